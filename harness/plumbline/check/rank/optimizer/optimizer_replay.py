"""Replays one optimizer step on copies: in the parameters' own precision, and in float64.

A twin is an optimizer of the same class and with the same options that has copies of parameters, gradients and state:
of a few parameters if the class updates each entry by itself, else of one, or of all parameters if the class is not
one of torch's own and enough memory is free. Nothing of the training is touched: if the class is not one of torch's
own, a guard ends the replay before an operation reads or writes the training's tensors, or communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plumbline.check.rank.memory_needed import bytes_of_steps, is_free
from plumbline.check.rank.optimizer.twin import (
    Inputs,
    StepInput,
    Widened,
    has_share,
    is_of_ranks,
    is_plain,
    stepped,
    stepped_all,
    uncompiled,
)
from plumbline.devices.calls import forked
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import is_shard, local
from plumbline.replay.random_state import RandomState, drawn_from

ENTRY_BY_ENTRY = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD",
     "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"}
)  # fmt: skip
"""Classes of torch.optim that update each entry by itself, so that a shard can be replayed alone."""

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

Attributes = Callable[[str, Any], Any]
"""Called with the name and the value of an attribute or option of an optimizer, and returns its replacement."""


class NotReplayable(Exception):  # noqa: N818 - it is a statement about the optimizer, not an error of the program
    """The step cannot be replayed; the message says why, as the end of «not judged: …»."""


class NeedsOtherRanks(NotReplayable):
    """One rank cannot replay the step alone: it has only a shard, or the step communicates."""


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """The right weights after a step, in float64, and those after the same step in the parameter's own precision.

    ``traced``: the weights with the arithmetic of compiled code, None if nothing is compiled. ``lowered``: whether the
    step computes in 16 bits although the weights have more.
    """

    exact: Tensor
    native: Tensor
    traced: Tensor | None = None
    lowered: bool = False


def is_of_torch(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose step changes weights: the inner one for ZeroRedundancyOptimizer, with its share."""
    inner = getattr(optimizer, "optim", None)
    is_zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer" and isinstance(inner, Optimizer)
    return inner if is_zero else optimizer  # type: ignore[return-value]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups with which the optimizer that changes weights will step.

    A wrapper passes its options, such as the learning rate, to the inner optimizer only during the step.
    """
    inner = stepping(optimizer)
    if inner is optimizer:
        return optimizer.param_groups
    return [
        {**own, **{key: value for key, value in outer.items() if key != "params"}}
        for own, outer in zip(inner.param_groups, optimizer.param_groups, strict=True)
    ]


def require_replayable(optimizer: Optimizer) -> None:
    """Refuse optimizers whose step is not a function of each parameter's own weights, gradient and state.

    Raises:
        NotReplayable: it cannot be replayed parameter by parameter.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotReplayable(f"{name} evaluates the loss several times in a step, so its step cannot be recomputed")
    if not is_of_torch(optimizer):
        for key, value in vars(optimizer).items():
            if key not in _of_the_base_class() and not (is_plain(value) or is_of_ranks(value)):
                raise NotReplayable(f"{name}.{key} cannot be copied, so the step cannot be recomputed")


@cache  # the first optimizer of a process imports torch._dynamo, which takes a second
def _of_the_base_class() -> frozenset[str]:
    return frozenset(vars(Optimizer([torch.zeros(1)], {}))) | {"step", "grad_scale", "found_inf"}


def is_entry_by_entry(optimizer: Optimizer) -> bool:
    return is_of_torch(optimizer) and type(optimizer).__name__ in ENTRY_BY_ENTRY


def replayed(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor], guard: Guard
) -> list[ReplayedStep]:
    """Return the result of the optimizer's next step for some parameters of a group, which must have gradients.

    There is more than one parameter only if the optimizer updates each entry by itself.

    Raises:
        NotReplayable: the step of a copy fails.
    """
    name = type(optimizer).__name__
    if any(map(_is_part, parameters)) and not is_entry_by_entry(optimizer):
        raise NeedsOtherRanks(f"{name} combines all entries of a parameter, but the rank holds only a shard of it")
    if not is_of_torch(optimizer) and any(has_share(optimizer, one) for one in parameters):
        raise NeedsOtherRanks(f"the rank holds the state of {name} for some parameters only")
    inputs = [StepInput.of(optimizer, one) for one in parameters]
    joined = StepInput.joined(inputs) if is_entry_by_entry(optimizer) else None
    given = [(group, inputs if joined is None else [joined])]
    with replaying(optimizer, guard):
        native = stepped_all(optimizer, given)
        exact, lowered = exactly_stepped_all(optimizer, given)
        compiled = is_of_torch(optimizer) and _is_anything_compiled()
        traced = stepped_all(optimizer, given, traced=True) if compiled else [None] * len(native)
    if joined is not None:
        exact, native, traced = (_parted(one, inputs) for one in (exact, native, traced))
    return [ReplayedStep(*each, lowered) for each in zip(exact, native, traced, strict=True)]


def _parted(joined: Sequence[Tensor | None], inputs: Sequence[StepInput]) -> list[Any]:
    (after,) = joined
    if after is None:
        return [None] * len(inputs)
    parts = torch.split(after, [one.weights.numel() for one in inputs])
    return [part.view(one.weights.shape) for part, one in zip(parts, inputs, strict=True)]


def depends_on_others(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, guard: Guard, after: Tensor
) -> bool:
    """Return whether a parameter's weights ``after`` the step of all are not those after its step alone."""
    try:
        with replaying(optimizer, guard):
            return not torch.equal(stepped(optimizer, group, StepInput.of(optimizer, parameter)), after)
    except NeedsOtherRanks:
        raise
    except NotReplayable:
        return True


def _is_part(parameter: Tensor) -> bool:
    return local(parameter) is not parameter or is_shard(parameter)


def replayed_at_once(optimizer: Optimizer, guard: Guard) -> dict[int, ReplayedStep]:
    """Return the result of the next step for all parameters at once, by the parameter's number.

    An update can then depend on other parameters, as if the step clips, or adapts one learning rate for all. The
    result is empty if this is not needed, or not possible on this rank.
    """
    parameters = parameters_of(optimizer)
    if is_of_torch(optimizer) or any(_is_part(one) or has_share(optimizer, one) for one in parameters):
        return {}
    held = [_tensors(optimizer.state.get(one, {})) for one in parameters]
    entries = sum(one.numel() for one in parameters) + sum(one.numel() for each in held for one in each)
    if not is_free(bytes_of_steps(entries), parameters[0].device):
        return {}
    state = optimizer.state
    groups = [
        (group, [StepInput(one.detach(), one.grad, state.get(one)) for one in group["params"]])
        for group in optimizer.param_groups
        if group["params"]
    ]
    shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    with replaying(optimizer, guard):
        native = stepped_all(optimizer, groups, shared=shared)
    with replaying(optimizer, guard):
        exact, lowered = exactly_stepped_all(optimizer, groups, shared=shared)
    rows = zip(exact, native, strict=True)
    return {number: ReplayedStep(*one, lowered=lowered) for number, one in enumerate(rows)}


def exactly_stepped(
    optimizer: Optimizer, group: dict[str, Any], given: StepInput, attributes: Attributes | None = None
) -> tuple[Tensor, bool]:
    """Return the weights after a step all in float64, and whether the class itself computes in 16 bits."""
    after, lowered = exactly_stepped_all(optimizer, [(group, [given])], attributes=attributes)
    return after[0], lowered


def exactly_stepped_all(optimizer: Optimizer, groups: Inputs, **options: Any) -> tuple[list[Tensor], bool]:
    """Return the same for all parameters of a twin."""
    if is_entry_by_entry(optimizer):
        return stepped_all(optimizer, groups, exact=True, **options), False
    widened = Widened()
    try:
        with widened:
            after = stepped_all(optimizer, groups, exact=True, **options)
    except NotReplayable:
        raise
    except Exception:  # the class needs the precision that it asks for
        return stepped_all(optimizer, groups, exact=True, **options), False
    dtypes = {given.weights.dtype for _, inputs in groups for given in inputs}
    return after, widened.lowered and dtypes.isdisjoint((torch.float16, torch.bfloat16))


@contextmanager
def replaying(optimizer: Optimizer, guard: Guard, *, communicates: bool = False) -> Iterator[None]:
    """A context for stepping twins. An exception of the optimizer's class becomes a reason not to judge it.

    Raises:
        NotReplayable: the step of a copy fails.
    """
    try:
        with torch.no_grad(), guard.around(optimizer, communicates=communicates):
            yield
    except NotReplayable:
        raise
    except Exception as error:  # a class that is not torch's own can raise anything
        name = type(optimizer).__name__
        raise NotReplayable(f"stepping a copy of {name} failed ({type(error).__name__}: {error})") from error


class Guard:
    """Keeps the replay of a class that is not torch's own away from the training's tensors and from other ranks."""

    def __init__(self, optimizer: Optimizer) -> None:
        tensors = () if is_of_torch(optimizer) else _tensors_of(optimizer)
        self._protected = {memory(tensor) for tensor in tensors} - {0}
        self._devices = [
            device for device in {tensor.device for tensor in parameters_of(optimizer)} if device.type != "cpu"
        ]

    @contextmanager
    def around(self, optimizer: Optimizer, *, communicates: bool = False) -> Iterator[None]:
        """Make one replay harmless. The random numbers that it draws do not advance the training's generators.

        ``communicates``: the replay may communicate, because all ranks take part.
        """
        if is_of_torch(optimizer):
            yield
            return
        no_touch = _NoTouch(self._protected, communicates=communicates)
        with drawn_from(RandomState.now(())), forked(self._devices), uncompiled(), no_touch:
            yield


class _NoTouch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, protected: set[int], *, communicates: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._protected = protected
        self._communicates = communicates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COMMUNICATION and not self._communicates:
            raise NeedsOtherRanks("this optimizer's step communicates with other ranks")
        if func not in _COPIES:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and memory(leaf) in self._protected:
                    raise NotReplayable("this optimizer's step uses tensors other than the parameter's own")
        return func(*args, **(kwargs or {}))


_COPIES = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.detach.default,
     torch.ops.aten.alias.default}
)  # fmt: skip
"""Operations that the replay itself applies to the training's tensors. None of them writes."""


def _is_anything_compiled() -> bool:
    """Return whether torch.compile has seen a frame. It is unknown whether this step was among them."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in parameters_of(optimizer):
        yield from _tensors((parameter, parameter.grad))
    yield from _tensors(list(optimizer.state.values()))


def _tensors(values: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own (sparse tensors, wrappers)."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
