"""Draws a replay's random numbers in the dtype in which the model draws them, whatever the replay computes in.

A generator gives other numbers for another dtype. A float64 replay that drew in float64 would have other dropout masks
than the training.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from plumbline.recording.backward_passes import in_backward
from plumbline.replay.nested import tensors_in
from plumbline.replay.precision import ReplayPrecision, default_dtype
from plumbline.replay.random_state import RandomState
from plumbline.replay.unwrapping import is_compiled_itself

_IN_PLACE = frozenset({"uniform_", "normal_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"})
_LIKE = frozenset({"rand_like", "randn_like"})
_FROM_VALUES = frozenset(
    {"normal", "bernoulli", "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"}
)
_MADE = frozenset({"rand", "randn", "normal"})
_DROPOUT = "native_dropout"

DRAWING = _IN_PLACE | _LIKE | _FROM_VALUES | _MADE | {_DROPOUT}
"""Names of operators that draw random numbers whose values depend on a dtype."""


class UnknownDrawError(Exception):
    """The dtype of a draw is unknown. A replay in the model's own precision must find it first."""


class Draws:
    """The dtypes in which a forward and its backward pass draw random numbers, in order.

    ``dtypes`` is None if they are not known; draws then use ``usual``, if that is known. ``default`` is the default
    dtype of the training. ``compiled`` draws in place of the operators if the training runs compiled code.
    """

    def __init__(
        self,
        precision: ReplayPrecision,
        dtypes: Iterable[torch.dtype] | None,
        usual: torch.dtype | None,
        default: torch.dtype,
        compiled: CompiledDraws | None = None,
    ) -> None:
        self._compiled = compiled
        self._precision = precision
        self._dtypes = None if dtypes is None else iter(dtypes)
        self._usual = usual
        self._default = default

    def draw(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that draws random numbers, and return its result in the precision of the replay."""
        first = leading(args)
        dtype = self._dtype(kwargs.get("dtype"), is_made=first is None)
        drawn: Any = None if self._compiled is None else self._compiled.draw(name, dtype, args, kwargs)
        if drawn is not None:
            return widened(drawn, self._precision)
        if first is None:
            return widened(func(*args, **{**kwargs, "dtype": dtype}), self._precision)
        if name == _DROPOUT:
            return _dropout(func, dtype, *args)
        if name in _IN_PLACE:
            own = torch.empty_like(first, dtype=dtype)
            return first.copy_(func(own, *(_lowered(one, dtype) for one in args[1:]), **kwargs))
        named = {**kwargs, "dtype": dtype} if name in _LIKE else kwargs
        return widened(func(*(_lowered(one, dtype) for one in args), **named), self._precision)

    def _dtype(self, asked: torch.dtype | None, *, is_made: bool) -> torch.dtype:
        """Return the dtype of the next draw. ``asked`` may be a tensor's dtype, which is wider here than in training.

        ``is_made``: no argument is a tensor with a dtype.
        """
        if self._dtypes is not None:
            dtype = next(self._dtypes, None)
        elif asked is not None:
            dtype = None if self._precision.wide(asked) is asked else asked
        else:
            dtype = self._default if is_made else self._usual
        if dtype is None:
            raise UnknownDrawError
        return dtype


def is_drawn(args: tuple[Any, ...]) -> bool:
    """Return whether an operator in ``DRAWING`` draws floating-point numbers with these arguments."""
    first = leading(args)
    return first is None or first.is_floating_point()


def leading(args: tuple[Any, ...]) -> Tensor | None:
    """Return the first tensor among the first two arguments; a draw uses its dtype."""
    return next((one for one in args[:2] if isinstance(one, Tensor)), None)


def dtype_of_draw(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    first = leading(args)
    asked: torch.dtype | None = kwargs.get("dtype")
    return asked or (torch.get_default_dtype() if first is None else first.dtype)


def widened(result: Any, precision: ReplayPrecision) -> Any:
    """Return a tensor in the precision of a replay, and any other value unchanged."""
    return result.to(precision.wide(result.dtype)) if isinstance(result, Tensor) else result


def _lowered(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _dropout(func: Any, dtype: torch.dtype, x: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    _, mask = func(torch.ones_like(x, dtype=dtype), p, train)
    if train is False:
        return x.clone(), mask
    return kept(x, mask, p), mask


class DrawsInBackwardError(Exception):
    """A backward pass draws random numbers outside of the modules that it runs again."""


class ForwardDraws:
    """Saves the generators' states when a module runs in the forward, and sets them when a backward pass runs it again.

    A hand-written activation checkpoint has to do the same. A module that runs several times in the forward is left
    alone, because it is unknown which of its runs is repeated.
    """

    def __init__(self) -> None:
        self._states: dict[nn.Module, RandomState | None] = {}
        self._running: list[nn.Module] = []
        self._outside: RandomState | None = None
        self._handles: list[Any] = []

    @property
    def repeats(self) -> bool:
        """Whether a module is running again with the states of its forward."""
        return self._outside is not None

    def __enter__(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not in_backward():
            known = module in self._states
            self._states[module] = None if known else _now(module, args)
            return
        state = self._states.get(module)
        if not self._running and state is not None:
            self._outside = _now(module, args)
            state.set()
        self._running.append(module)

    def _ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward() and self._running:
            self._running.pop()
            if not self._running and self._outside is not None:
                self._outside.set()
                self._outside = None


def _now(module: nn.Module, args: tuple[Any, ...]) -> RandomState:
    return RandomState.now(one.device for one in (*tensors_in(args), *module.parameters()))


_ALL_SEEDS = (-(2**63), 2**63 - 1)

_UNIFORM = frozenset({"native_dropout", "bernoulli_", "rand", "rand_like"})
_NORMAL = frozenset({"randn", "randn_like"})


class CompiledDraws:
    """Draws in place of a module's compiled graphs. In the first forward that it follows, it only counts draws."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = {id(one) for one in module.modules() if is_compiled_itself(one)}
        self._counts: list[int] | None = None
        self._begun: list[int] = []
        self._inside: list[nn.Module] = []
        self._seeds: Iterator[Tensor] | None = None

    @property
    def are_any(self) -> bool:
        """Whether a graph draws random numbers."""
        return any(self._counts or ())

    def draw(
        self, name: str, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Return a graph's result for the operator ``name``; None outside of graphs, and while draws are counted.

        Raises:
            DrawsInBackwardError: A backward pass draws, and it is not known which draw of the graph it repeats.
        """
        if (self._parts and not self._inside) or name not in _UNIFORM | _NORMAL:
            return None
        if in_backward():
            raise DrawsInBackwardError
        if name == "native_dropout" and args[2:] == (False,):
            return None
        self._begun[-1] += 1
        if self._counts is None:
            return None
        first: Any = args[0]
        like = first if isinstance(first, Tensor) else torch.empty(first, device=kwargs.get("device"))
        numbers = self._numbers(like, "randn" if name in _NORMAL else "rand").to(dtype)
        if name == "native_dropout":
            mask = numbers > args[1]
            return kept(first, mask, args[1]), mask
        if name == "bernoulli_":
            # CPU dropout draws its mask with this. Compiled dropout keeps entries whose number exceeds the drop rate.
            written: Tensor = first.copy_(numbers > 1 - (args[1] if len(args) > 1 else 0.5))
            return written
        return numbers

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow a forward. Its graphs begin with the compiled modules."""
        self._begun, self._inside = [], []
        if not self._parts:
            self._begin()
        begins = register_module_forward_pre_hook(lambda module, _: self._enter(module))
        ends = register_module_forward_hook(lambda module, *_: self._leave(module), always_call=True)
        try:
            yield
        finally:
            begins.remove()
            ends.remove()
        if self._counts is None:
            self._counts = self._begun

    def _numbers(self, like: Tensor, kind: str) -> Tensor:
        if self._seeds is None and self._counts is not None:
            count = self._counts[len(self._begun) - 1]
            seeds = torch.empty(count, dtype=torch.int64, device=like.device)
            self._seeds = iter(torch.ops.aten.randint.low_out(*_ALL_SEEDS, [count], out=seeds).unbind())
        seed = next(self._seeds or iter(()), None)
        if seed is None:
            raise ValueError("its compiled code draws more random numbers than when it ran first")
        return _made(seed, like.numel(), kind).view(like.shape)

    def _enter(self, module: nn.Module) -> None:
        if id(module) in self._parts:
            if not self._inside:
                self._begin()
            self._inside.append(module)

    def _leave(self, module: nn.Module) -> None:
        if self._inside and self._inside[-1] is module:
            self._inside.pop()

    def _begin(self) -> None:
        self._begun.append(0)
        self._seeds = None


def kept(x: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the entries that dropout keeps, scaled up; ``share`` is the share of entries that it drops."""
    return x * mask * (0.0 if share == 1 else 1 / (1 - share))


def are_known() -> bool:
    """Return whether compiled code of this process draws as TorchInductor does, and replays can run uncompiled."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    return inductor is not None and not inductor.fallback_random and hasattr(torch.compiler, "set_stance")


def _made(seed: Tensor, count: int, kind: str) -> Tensor:
    with default_dtype(torch.float32), torch.no_grad(), torch.compiler.set_stance("default"):
        return _compiled()(seed, count, kind)


@cache
def _compiled() -> Callable[[Tensor, int, str], Tensor]:
    from torch._inductor import inductor_prims

    def numbers(seed: Tensor, count: int, kind: str) -> Tensor:
        return inductor_prims.random([count], seed, kind)  # type: ignore[no-any-return]

    return torch.compile(numbers, dynamic=True)
