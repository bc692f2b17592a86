"""Draws random numbers as TorchInductor's compiled code does, for a replay that runs the same code uncompiled.

Compiled code takes one seed per draw from the generator, all seeds of a graph when the graph begins. Each draw computes
its numbers from its seed and their positions, with a separate generator. So a replay needs to know which draws belong
to a graph. It assumes one graph for each compiled module; the outputs of the call show whether that is right.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from plumbline.recording.backward_passes import in_backward
from plumbline.replay.forward_draws import DrawsInBackwardError
from plumbline.replay.precision import default_dtype
from plumbline.replay.unwrapping import is_compiled_itself

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
