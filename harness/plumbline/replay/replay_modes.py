"""The dispatch modes of replays, through which every operator of a replay runs."""

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
from plumbline.replay.derivatives import Constants, written
from plumbline.replay.draws import (
    DRAWING,
    CompiledDraws,
    Draws,
    DrawsInBackwardError,
    ForwardDraws,
    dtype_of_draw,
    is_drawn,
    widened,
)
from plumbline.replay.memory import address_of
from plumbline.replay.precision import ReplayPrecision


class CommunicatesError(Exception):
    """A replay would communicate with other ranks, which may not replay the same call."""


class ReplayMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Restores, after the replay, generators that the script passes to operators, and memory that existed before.

    A replay can write to memory that the training still uses: a parameter that balances experts, or a tensor of an
    object that is no module. ``saves_with_hooks``: a forward under the mode saved tensors with hooks, as a checkpoint
    does, so its backward pass runs parts of it again. With ``forward_draws``, a backward pass must not draw numbers of
    its own. ``may_communicate``: all ranks replay together. ``computes_otherwise``: an operator of the forward was
    replaced, so its derivative has to be replaced, too.
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
        """Return False: replays compile nothing, and the wrapper against compilation would cost more than the mode."""
        return False

    def put_back(self) -> None:
        """Restore the states of generators and the values of memory from before the replay."""
        for generator, state in self._generators:
            generator.set_state(state)
        for storage, before in self._written.values():
            storage.copy_(before)  # this does not change a tensor's version
        self._generators.clear()
        self._written.clear()
        self._made.clear()

    def _noted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kind:
        if not self.saves_with_hooks:
            self.saves_with_hooks = _hooks_on_saved_tensors()
        kind = _kind(func)
        if kind is _Kind.COMMUNICATES and not self.may_communicate and reaches_others(func, (*args, *kwargs.values())):
            raise CommunicatesError
        return kind

    def _before_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places, names = written(func)
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
    """Random errors like those of a format with the unit roundoff ``unit``; the ``seed`` determines them."""

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, result: Any) -> Any:
        """Add an error to each entry of the floating-point tensors in a result, in place; return the result.

        Whole numbers are exact: they may be positions or counts, which change meaning when they become a bit smaller.
        So are infinities, as in masks.
        """
        if isinstance(result, (list, tuple)):
            return type(result)(self.of(one) for one in result)
        if not isinstance(result, Tensor) or not result.is_floating_point() or _is_fake(result):
            return result
        own = local(result)
        errors = torch.randn(own.shape, generator=self._generator, dtype=torch.float32).to(own.device)
        with torch.no_grad():
            own.add_((own * errors).masked_fill_(own == own.round(), 0.0), alpha=self._unit)
        return result


def _is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no values. DTensor infers and caches the shapes of results with such tensors."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


class NativeMode(ReplayMode):  # type: ignore[no-untyped-call]
    """Runs operators unchanged, and notes the dtypes of random draws. If given, ``compiled`` draws instead."""

    def __init__(self, compiled: CompiledDraws | None = None) -> None:
        super().__init__()
        self.drawn: list[torch.dtype] = []
        self._compiled = compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
    """Replaces lower precisions to which the model's code casts by the precision of the replay."""

    def __init__(self, precision: ReplayPrecision, random: Draws) -> None:
        super().__init__()
        self._precision = precision
        self._random = random
        self.rounding: Rounding | None = None
        self.constants: Constants | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self._noted(func, args, kwargs)
        self._before_write(func, args, kwargs)
        if self.constants is not None and kind is not _Kind.COMMUNICATES:  # collectives' schemas declare no writes
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
            # It has a tensor that is no parameter, buffer or argument, such as an attribute of another object.
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
def _makes(func: Any) -> bool:
    """Return whether the results of an operator have their own memory."""
    is_operator = isinstance(func, torch._ops.OpOverload)
    return is_operator and all(one.alias_info is None for one in func._schema.returns)


@cache
def _rounds(func: Any) -> bool:
    """Return whether an operator computes new tensors. Collectives do not count: they may still run on return."""
    if not isinstance(func, torch._ops.OpOverload):
        return True
    if _kind(func) is _Kind.COMMUNICATES or _name(func) in _EXACT:
        return False
    return not func._schema.is_mutable and all(one.alias_info is None for one in func._schema.returns)


_EXACT = frozenset({"clone", "_to_copy", "detach"})


@cache
def _kind(func: Any) -> _Kind:
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
    """Return whether hooks on saved tensors are active; True if torch cannot tell."""
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


def grouped_mm(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Return what ``aten::_grouped_mm`` does, one product at a time, in the dtype of the matrices.

    Args:
        one: (rows, inner) or (groups, rows, inner).
        other: (inner, columns) or (groups, inner, columns).
        offs: (groups), where each group ends. If one matrix has no group dimension, groups divide its rows (``one``) or
            columns (``other``). If neither has one, groups divide the inner dimension, and the result is (groups, rows,
            columns).
        bias: added to the products.
        out_dtype: not used.
    """
    if offs is None:
        made = one @ other
        return made if bias is None else made + bias
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if one.dim() == other.dim():
        made = torch.stack([one[:, group] @ other[group] for group in groups])
    elif one.dim() == 2:
        made = one.new_zeros(len(one), other.shape[2])
        for matrix, group in zip(other, groups, strict=True):
            made[group] = one[group] @ matrix
    else:
        made = other.new_zeros(one.shape[1], other.shape[1])
        for matrix, group in zip(one, groups, strict=True):
            made[:, group] = matrix @ other[:, group]
    return made if bias is None else made + bias
