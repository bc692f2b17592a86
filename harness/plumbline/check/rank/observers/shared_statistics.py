"""Watches what a forward computes from all of its tokens together on purpose: statistics, scales and selections."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

_NORMS = ("group_norm", "instance_norm")
_SCALED = ("round", "round_", "fake_quantize_per_tensor_affine", "fused_moving_avg_obs_fake_quant")
"""Functions that quantise: they have one scale for all tokens."""

_SELECTIONS = ("topk", "argmax", "sort", "argsort", "multinomial")
_TRAINING = 5
"""The place of ``training`` among the arguments of ``batch_norm``."""


class Shared(Protocol):
    """Takes a tensor with shared statistics, None for scaled values, or with ``by_token`` a selection's scores."""

    def __call__(self, given: Tensor | None, *, by_token: bool) -> None: ...


class shared_statistics(TorchFunctionMode):  # noqa: N801
    """Tells ``shared`` of each such function that is called inside the block."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and given.is_floating_point() and given.dim() > 1:
            if name in _SCALED:
                self._shared(None, by_token=False)
            elif name in _NORMS or (name == "batch_norm" and _trains(args, kwargs)):
                self._shared(given.detach(), by_token=False)
            elif name in _SELECTIONS or (name == "max" and _has_dimension(args, kwargs)):
                self._shared(given.detach(), by_token=True)
        return func(*args, **kwargs)


def _trains(args: Any, kwargs: Any) -> bool:
    return bool(args[_TRAINING] if len(args) > _TRAINING else kwargs.get("training"))


def _has_dimension(args: Any, kwargs: Any) -> bool:
    return type(args[1] if len(args) > 1 else kwargs.get("dim")) is int
