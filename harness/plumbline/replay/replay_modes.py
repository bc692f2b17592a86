"""The dispatch modes under which calls are replayed: what every operator of a replay goes through."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.recording.backward_passes import in_backward
from plumbline.recording.sharding import local
from plumbline.replay.collectives import is_collective, reaches_others
from plumbline.replay.compiled_draws import CompiledDraws
from plumbline.replay.derivatives import Constants
from plumbline.replay.draws import DRAWING, Draws, dtype_of_draw, is_drawn, widened
from plumbline.replay.forward_draws import DrawsInBackwardError, ForwardDraws
from plumbline.replay.grouped_products import grouped_mm
from plumbline.replay.memory import address_of
from plumbline.replay.precision import ReplayPrecision


class CommunicatesError(Exception):
    """A replay would communicate with other ranks, which may not be replaying the same."""


class ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts generators that the script passes to operators back to their states when the replay is over.

    What is written to memory that was there before is taken back, too: a parameter that shares it with the training, as
    a bias that balances experts, or a tensor of an object that is no module.
    ``saves_with_hooks`` says whether a forward under the mode saved tensors with hooks, as a checkpoint does, so that
    its backward pass runs parts of it again. Where there are ``forward_draws``, no backward pass may draw on its own.
    ``may_communicate``: all ranks replay together. ``computes_otherwise``: an operator of the forward was computed in
    another way, so that its derivative has to be, too.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saves_with_hooks = False
        self.computes_otherwise = False
        self.may_communicate = False
        self.forward_draws: ForwardDraws | None = None
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._made: set[int] = set()
        self._written: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a replay: the wrapper against it would cost more than the mode does."""
        return False

    def put_back(self) -> None:
        """Set generators to the states that they had before the replay, and memory to its values."""
        for generator, state in self._generators:
            generator.set_state(state)
        for storage, before in self._written.values():
            storage.copy_(before)  # which no backward pass notices
        self._generators.clear()
        self._written.clear()
        self._made.clear()

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kind:
        """Return the kind of an operator that is about to run."""
        if not self.saves_with_hooks:
            self.saves_with_hooks = _hooks_on_saved_tensors()
        kind = _kind(func)
        if kind is _Kind.COMMUNICATES and not self.may_communicate and reaches_others(func, (*args, *kwargs.values())):
            raise CommunicatesError
        return kind

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places, names = _written(func)
        for one in _tensors([*(args[place] for place in places if place < len(args)), *map(kwargs.get, names)]):
            address = address_of(one)
            if address and address not in self._made and address not in self._written:
                storage: Any = one.untyped_storage()
                self._written[address] = storage, storage.clone()

    def _note_made(self, func: Any, result: Any) -> Any:
        if _makes(func):
            self._made.update(map(address_of, _tensors(result)))
        return result

    def _before_draw(self, kwargs: dict[str, Any]) -> None:
        if self.forward_draws is not None and in_backward() and not self.forward_draws.repeats:
            raise DrawsInBackwardError
        generator = kwargs.get("generator")
        if generator is not None and all(one is not generator for one, _ in self._generators):
            self._generators.append((generator, generator.get_state()))


class Rounding:
    """Errors like those of computing in a format of the unit roundoff ``unit``: the same ones for the same ``seed``."""

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, result: Any) -> Any:
        """Return the floating-point tensors in a result with an error in each entry."""
        if isinstance(result, (list, tuple)):
            return type(result)(self.of(one) for one in result)
        if not isinstance(result, Tensor) or not result.is_floating_point() or _is_fake(result):
            return result
        own = local(result)
        errors = torch.randn(own.shape, generator=self._generator, dtype=own.dtype).to(own.device) * self._unit
        with torch.no_grad():
            own.mul_(1 + errors)
        return result


def _is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no values: DTensor finds the shapes of results with such ones, once for each."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


class NativeMode(ReplayMode):  # type: ignore[no-untyped-call]
    """Changes nothing, and notes the dtypes in which random numbers are drawn, or draws as ``compiled`` does."""

    def __init__(self, compiled: CompiledDraws | None = None) -> None:
        super().__init__()
        self.drawn: list[torch.dtype] = []
        self._compiled = compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        kind = self._noted(func, args, kwargs)
        self._before_write(func, args, kwargs)
        if kind is _Kind.DRAWS:
            self._before_draw(kwargs)
            if is_drawn(args):
                self.drawn.append(dtype := dtype_of_draw(args, kwargs))
                drawn = None if self._compiled is None else self._compiled.draw(_name(func), dtype, args, kwargs)
                if drawn is not None:
                    return drawn
        return self._note_made(func, func(*args, **kwargs))


class WideMode(ReplayMode):  # type: ignore[no-untyped-call]
    """Lets everything that the model's code casts to a lower precision become that of the replay."""

    def __init__(self, precision: ReplayPrecision, random: Draws) -> None:
        super().__init__()
        self._precision = precision
        self._random = random
        self.rounding: Rounding | None = None
        self.constants: Constants | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        kwargs = kwargs or {}
        kind = self._noted(func, args, kwargs)
        self._before_write(func, args, kwargs)
        if self.constants is not None and kind is not _Kind.COMMUNICATES:  # whose schemas do not say what they write to
            args, kwargs = self.constants.put(func, args, kwargs)
        if kind is _Kind.DRAWS:
            self._before_draw(kwargs)
            if is_drawn(args):
                return self._random.draw(func, _name(func), args, kwargs)
        if kind is not _Kind.PLAIN:
            args, kwargs = self._with_wide_dtypes(args, kwargs)
        if self.constants is not None and kind is _Kind.COMMUNICATES:
            return self.constants.communicate(func, lambda: func(*args, **kwargs), (args, kwargs))
        if kind is _Kind.IS_NARROW:
            self.computes_otherwise = True
        try:
            result = (grouped_mm if kind is _Kind.IS_NARROW else func)(*args, **kwargs)
        except RuntimeError:
            # a tensor that is no parameter, buffer or argument, such as a plain attribute of another object
            if not any(self._precision.wide(one.dtype) is not one.dtype for one in _tensors((args, kwargs))):
                raise
            return func(*self._widened(args), **self._widened(kwargs))
        if self.constants is not None:
            self.constants.computed(func, (args, kwargs), result)
        result = self._note_made(func, widened(result, self._precision) if kind is _Kind.LIFTS else result)
        return self.rounding.of(result) if self.rounding is not None and _rounds(func) else result

    def _with_wide_dtypes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        wide = self._precision.wide
        if any(isinstance(one, torch.dtype) for one in args):
            args = tuple(wide(one) if isinstance(one, torch.dtype) else one for one in args)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs = {**kwargs, "dtype": wide(kwargs["dtype"])}
        return args, kwargs

    def _widened(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._widened(part) for part in value)
        if isinstance(value, dict):
            return {name: self._widened(part) for name, part in value.items()}
        return widened(value, self._precision)


class _Kind(Enum):
    PLAIN = "needs no change"
    CASTS = "may be given a dtype"
    DRAWS = "draws random numbers"
    COMMUNICATES = "is a collective, in which all ranks of a group have to take part"
    IS_NARROW = "has no kernels for float64"
    LIFTS = "gives a tensor that was made from Python numbers"


@cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """Return the places and the names of the arguments that an operator writes to."""
    arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()
    written = [(place, one) for place, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]
    return [place for place, one in written if not one.kwarg_only], [one.name for _, one in written]


@cache
def _makes(func: Any) -> bool:
    """Return whether the results of an operator have memory of their own."""
    is_operator = isinstance(func, torch._ops.OpOverload)
    return is_operator and all(one.alias_info is None for one in func._schema.returns)


@cache
def _rounds(func: Any) -> bool:
    """Return whether an operator computes new tensors: collectives may still run when they return."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    if _kind(func) is _Kind.COMMUNICATES or _name(func) in _EXACT:
        return False
    return not func._schema.is_mutable and all(one.alias_info is None for one in func._schema.returns)


_EXACT = frozenset({"clone", "_to_copy", "detach"})


@cache
def _kind(func: Any) -> _Kind:
    """Return what is to be changed about calls of an operator."""
    if not isinstance(func, torch._ops.OpOverload):
        return _Kind.PLAIN  # an operator with functions as arguments, such as flex_attention
    name = _name(func)
    if is_collective(func):
        return _Kind.COMMUNICATES
    if name in DRAWING:
        return _Kind.DRAWS
    if name == "_grouped_mm":
        return _Kind.IS_NARROW
    if name in ("lift_fresh", "lift_fresh_copy", "lift"):
        return _Kind.LIFTS
    return _Kind.CASTS if any("ScalarType" in str(one.real_type) for one in func._schema.arguments) else _Kind.PLAIN


def _hooks_on_saved_tensors() -> bool:
    """Return whether hooks are on the tensors that are saved at present; true where torch cannot say so."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _name(func: Any) -> str:
    return str(func._schema.name.partition("::")[2])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
