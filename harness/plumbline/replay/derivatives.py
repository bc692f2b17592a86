"""Handles what autograd leaves out of a forward's derivative: constants, and gradients that a script defines.

A finite difference of two forwards sees through ``detach`` and ``no_grad``. So the constant values are recorded in one
forward, and reused in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from plumbline.recording.sharding import local
from plumbline.replay.applied_functions import functions_applied
from plumbline.replay.collectives import collectives
from plumbline.replay.function_derivatives import LARGEST, AppliedFunction, Terms, exchange_terms
from plumbline.replay.memory import address_of
from plumbline.replay.nested import map_tensors, tensors_in
from plumbline.replay.random_state import normal_like
from plumbline.replay.unsharding import is_distributed
from plumbline.replay.uses import nodes_of


class OwnDerivativeError(Exception):
    """A forward defines a gradient that is not the derivative of its values."""


class UnrepeatableError(Exception):
    """A custom function cannot run again alone, because it shares state with others. The message is its name."""


_IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"})
"""In-place collectives in which all ranks of a group take part, so that each can be waited for before others begin."""


class InPlace(Enum):
    """How to treat in-place changes by collectives to tensors with a gradient, which autograd does not see."""

    DERIVED = "depends on the tensors of all ranks"
    NUMBERS_CONSTANT = "is a constant for tensors of one entry, such as losses that are added up to be printed"
    CONSTANT = "is a constant"


class Received:
    """The memory of results without a gradient that collectives return for tensors with one, and of dependent values.

    Autograd treats such values as constants. If gradients are disabled around a collective, or tensors are detached,
    that is intended, and nothing is noted. Some noted values may not depend on weights.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}  # the reference keeps the key from being reused
        self._has_sent = False

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._memory) and (memory := _memory_of(tensor)) is not None and memory._cdata in self._memory

    def communicated(self, func: Any, arguments: Any, result: Any) -> None:
        """Note the tensors that a collective may have written to, if it was given a tensor with a gradient."""
        if not torch.is_grad_enabled():
            return
        given, name = list(tensors_in(arguments)), func._schema.name.partition("::")[2]
        has_gradient = any(one.requires_grad for one in given)
        self._has_sent |= has_gradient and name == "send"
        if has_gradient or (self._has_sent and name.startswith("recv")):
            self._note(one for one in (*given, *tensors_in(result)) if not one.requires_grad)

    def computed(self, func: Any, arguments: Any, result: Any) -> None:
        if self._memory and torch.is_grad_enabled():
            given = list(tensors_in(arguments))
            if any(one in self for one in given) and not any(one.requires_grad for one in given):
                if func is torch.ops.aten.detach.default:
                    for one in given:
                        self._memory.pop(_memory_of(one)._cdata, None)
                else:
                    self._note(tensors_in(result))

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            if (memory := _memory_of(one)) is not None:
                self._memory[memory._cdata] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]


def _memory_of(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if address_of(tensor) else None


class Constants:
    """The constants of one forward, in order: arguments without a gradient of operators that have others with one.

    They are recorded until ``replay`` is called, and replace those of each later forward. ``changes_in_place``: a
    collective changes a tensor that has a gradient; ``in_place`` says how to treat the change. ``receives``: an
    argument of an operator is the result, without a gradient, of a collective. If ``derives`` is set, such arguments
    are not replaced, because they depend on the tensors of all ranks.

    ``gradients`` are those that custom functions add to their inputs.
    """

    def __init__(self, gradients: AddedGradients | None = None) -> None:
        self.inside_function = 0
        self.gradients = AddedGradients() if gradients is None else gradients
        self._terms: dict[int, tuple[float, float]] = {}
        self._functions = 0
        self.changes_in_place = False
        self.in_place = InPlace.DERIVED
        self.receives = False
        self.derives = False
        self._received = Received()
        self._values: list[Any] = []
        self._are_received: list[bool] = []
        self._added: list[Tensor] = []
        self._place: int | None = None
        self._place_added = 0

    def replay(self) -> None:
        """Reuse the recorded values in the next forward, from the first one on."""
        self._place = self._place_added = self._functions = 0
        self._terms.clear()

    def ended(self, kind: Any, added: Sequence[Tensor | None], inputs: Sequence[Tensor], result: Any) -> None:
        """Count a custom function that has run. ``added``: the gradients to note that it adds to its inputs."""
        number = self._functions
        self._functions += 1
        if torch.is_grad_enabled():
            self.gradients.note(number, kind.__name__, added, tensors_in(result))
        if number in self.gradients:
            self._terms[number] = self.gradients.terms(number, inputs)

    def added(self) -> tuple[float, float]:
        """Return the sum of the inputs' products with the gradients that functions add to them, and a bound of it."""
        found = [terms for number, terms in self._terms.items() if number in self.gradients]
        return sum(term for term, _ in found), sum(size for _, size in found)

    def communicate(self, func: Any, run: Callable[[], Any], arguments: Any) -> Any:
        """Run a collective, and treat its in-place changes of tensors with a gradient as ``in_place`` says."""
        is_known = func._schema.name.partition("::")[2] in _IN_PLACE and not self.inside_function
        changed = [one for one in tensors_in(arguments) if one.requires_grad] if is_known else []
        before = [one.detach().clone() for one in changed]
        result = run()
        if not changed:
            if self.is_recorded and not self.inside_function:
                self._received.communicated(func, arguments, result)
            return result
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(part, (Tensor, list)) and hasattr(part, "wait"):
                part.wait()
        with torch.no_grad():
            for one, old in zip(changed, before, strict=True):
                self._add(one, old)
        return result

    def computed(self, func: Any, arguments: Any, result: Any) -> None:
        """Follow an operator that does not communicate, and keep what autograd counts as constant in its result."""
        if self.inside_function:
            return
        if self.is_recorded:
            self._received.computed(func, arguments, result)
        if _quantizes(func) and any(one.requires_grad for one in tensors_in(arguments)):
            raise OwnDerivativeError("the forward quantizes numbers, whose gradient is not the derivative of rounding")
        if func is torch.ops.aten.embedding.default:
            self._keep_padding(*arguments[0], result=result, **arguments[1])

    def _keep_padding(
        self,
        weight: Tensor,
        indices: Tensor,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        result: Tensor,
    ) -> None:
        """Replace the rows of an embedding at ``padding_idx`` by the recorded ones: they have no gradient."""
        if not weight.requires_grad:
            return
        if scale_grad_by_freq:
            raise OwnDerivativeError("an embedding scales its gradient by the frequency of tokens")
        if padding_idx < 0 or not bool((is_padding := local(indices) == padding_idx).any()):
            return
        if is_distributed(weight):
            raise OwnDerivativeError("an embedding has rows without a gradient (padding_idx), and is a DTensor")
        with torch.no_grad():
            result[is_padding] = self._constant(result[is_padding])

    @property
    def is_recorded(self) -> bool:
        """Whether constants are being recorded, and not yet reused."""
        return self._place is None

    def _add(self, changed: Tensor, before: Tensor) -> None:
        if self.is_recorded:
            self._added.append(changed.detach() - before)
            self.changes_in_place |= bool(self._added[-1].any())
            return
        added = self._added[self._place_added]
        self._place_added += 1
        is_number = self.in_place is InPlace.NUMBERS_CONSTANT and changed.numel() == 1
        if is_number or self.in_place is InPlace.CONSTANT:
            changed.copy_(before + added)

    def put(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an operator with the recorded constants in their places."""
        if self.inside_function:
            return args, kwargs
        places, named = written(func)
        read_args = tuple(one for index, one in enumerate(args) if index not in places)
        read_kwargs = {name: one for name, one in kwargs.items() if name not in named}
        new_args, new_kwargs = self.exchanged((read_args, read_kwargs))
        left = iter(new_args)
        return (
            tuple(one if index in places else next(left) for index, one in enumerate(args)),
            {**kwargs, **new_kwargs},
        )

    def exchanged(self, arguments: Any) -> Any:
        """Return arguments with the recorded constants, if any of them has a gradient."""
        if not any(one.requires_grad for one in tensors_in(arguments)):
            return arguments
        return map_tensors(arguments, lambda one: one if one.requires_grad else self._constant(one))

    def _constant(self, value: Tensor) -> Tensor:
        if self._place is None:
            self._values.append(value)
            self._are_received.append(value in self._received)
            self.receives |= self._are_received[-1]
            return value
        is_derived = self.derives and self._are_received[self._place]
        recorded: Tensor = self._values[self._place]
        self._place += 1
        if recorded.shape != value.shape or recorded.dtype != value.dtype:
            raise OwnDerivativeError("the forward takes a different branch when weights change slightly")
        return value if is_derived else recorded


@cache
def _quantizes(func: Any) -> bool:
    """Return whether an operator simulates quantization. Its gradient passes through the rounding."""
    return isinstance(func, torch._ops.OpOverload) and "fake_quant" in func._schema.name


@cache
def written(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return the positions and the names of the arguments that an operator writes to."""
    if not isinstance(func, torch._ops.OpOverload):
        return frozenset(), frozenset()
    arguments = list(enumerate(func._schema.arguments))
    found = [(place, one.name) for place, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return frozenset(place for place, _ in found), frozenset(name for _, name in found)


@contextmanager
def custom_functions(
    constants: Constants, *, verify: bool, exchanged: Callable[[str, Terms], None] | None = None
) -> Iterator[None]:
    """Pass recorded constants to custom autograd functions inside the block, as to operators.

    Args:
        constants: the constants of the forward that runs.
        verify: check that the backward of each function that does not communicate is the derivative of its forward. It
            is not if the script defines its own gradient, such as a straight-through estimator for rounding.
        exchanged: called with the name of each function that communicates, and this rank's terms of its derivative.

    Raises:
        OwnDerivativeError: A function has another derivative, or the forward registers a hook on a tensor.
        UnrepeatableError: A function cannot be verified.
    """
    register = torch.Tensor.register_hook

    def applied(run: Callable[..., Any], kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not constants.inside_function and (checkpointed := _checkpointed(kind, args)) is not None:
            return checkpointed()
        if constants.inside_function or kind.__module__.startswith("torch."):
            return _inside(constants, lambda: run(*args, **kwargs))
        args, kwargs = constants.exchanged((args, kwargs))
        function = AppliedFunction(run, args, kwargs)
        added = _inside(constants, lambda: _verified(kind, function)) if verify else []
        if exchanged is not None:
            terms = _inside(constants, lambda: exchange_terms(run, args, kwargs))
            if terms is not None:
                exchanged(kind.__name__, terms)
        result = _inside(constants, lambda: run(*args, **kwargs))
        constants.computed(kind, (args, kwargs), result)
        constants.ended(kind, added, function.inputs, result)
        return result

    def hooked(tensor: Tensor, hook: Any) -> Any:
        raise OwnDerivativeError("the forward registers hooks on tensors, which may change gradients")

    torch.Tensor.register_hook = hooked  # type: ignore[method-assign]
    try:
        with functions_applied(applied):
            yield
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def _checkpointed(kind: Any, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Return what an activation checkpoint computes, with gradients enabled; None for other functions.

    The checkpoints of torch, Megatron and DeepSpeed compute it without gradients, and again in the backward pass. Their
    second argument is an option, or DeepSpeed's list for the outputs.
    """
    if kind.__name__ != "CheckpointFunction" or len(args) < 2:
        return None
    function, option, *inputs = args
    if not callable(function) or not isinstance(option, (bool, list)):
        return None

    def compute() -> Any:
        result = function(*inputs)
        if isinstance(option, list):
            option.extend([result] if isinstance(result, Tensor) else result)
        return result

    return compute


def _inside(constants: Constants, run: Callable[[], Any]) -> Any:
    constants.inside_function += 1
    try:
        return run()
    finally:
        constants.inside_function -= 1


def _verified(kind: Any, function: AppliedFunction) -> Sequence[Tensor | None]:
    try:
        return _verify(kind, function)
    except OwnDerivativeError:
        raise
    except Exception as error:
        raise UnrepeatableError(kind.__name__) from error


def _verify(kind: Any, function: AppliedFunction) -> Sequence[Tensor | None]:
    """Compare the derivative of a custom function with a finite difference of its values, in a random direction.

    Return the gradient that its backward adds to each input. An input that has one must get no other.
    """
    before = collectives()
    generator = torch.Generator().manual_seed(0)
    along = function.directions(generator)
    given, leaves = function.outputs(along, 0.0)
    if not given or collectives() != before:
        return []
    cotangents = [normal_like(one, generator) for one in given]
    gradients = torch.autograd.grad(given, leaves, cotangents, allow_unused=True)
    changes = function.change(along)
    if collectives() != before:
        return []  # functions that communicate are compared over all ranks
    given, leaves = function.outputs(along, 0.0)  # a backward may have changed what the first outputs saved
    zeros = [torch.zeros_like(one) for one in given]
    added = [
        one if one is not None and bool(one.any()) else None
        for one in torch.autograd.grad(given, leaves, zeros, allow_unused=True)
    ]
    not_derived = f"the backward of {kind.__name__} is not the derivative of its forward"
    pairs = list(zip(gradients, added, along, strict=True))
    if any(more is not None and not torch.equal(gradient, more) for gradient, more, _ in pairs):
        raise OwnDerivativeError(not_derived)
    terms = [one * v for one, v in zip(changes, cotangents, strict=True)]
    due = [gradient * direction for gradient, more, direction in pairs if gradient is not None and more is None]
    apart = abs(sum(float(one.sum()) for one in terms) - sum(float(one.sum()) for one in due))
    size = max(sum(float(one.abs().sum()) for one in terms), sum(float(one.abs().sum()) for one in due))
    if apart > LARGEST * size:
        raise OwnDerivativeError(not_derived)
    return added


class AddedGradients:
    """The gradients that the functions of one forward add to their inputs, whatever arrives at their outputs.

    Trainers add auxiliary losses in this way: a function returns its input, and its backward starts a gradient.
    Functions have their numbers in the forward as keys. ``names`` are those of their classes.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._gradients: dict[int, Sequence[Tensor | None]] = {}
        self._nodes: dict[int, list[Any]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._gradients

    def note(self, number: int, name: str, gradients: Sequence[Tensor | None], results: Iterable[Tensor]) -> None:
        """Note the gradients that a function adds to its inputs, and the nodes of its results in the graph."""
        if any(one is not None for one in gradients):
            self._gradients[number], self.names[number] = gradients, name
            self._nodes[number] = [one.grad_fn for one in results]

    def keep_reached(self, outputs: Iterable[Tensor]) -> None:
        """Drop functions from which no output depends: the backward pass of these outputs does not run them."""
        reached = set(nodes_of(outputs))
        for number, nodes in self._nodes.items():
            if reached.isdisjoint(nodes):
                del self._gradients[number], self.names[number]
        self._nodes.clear()

    def terms(self, number: int, inputs: Sequence[Tensor]) -> tuple[float, float]:
        """Return the product of a function's inputs with the gradients that it adds, and a bound of it."""
        pairs = [
            (gradient, one.detach())
            for gradient, one in zip(self._gradients[number], inputs, strict=True)
            if gradient is not None
        ]
        products = (float((gradient * one).sum()) for gradient, one in pairs)
        return sum(products), sum(float(gradient.norm() * one.norm()) for gradient, one in pairs)
