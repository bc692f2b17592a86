"""Tensors that have been found for their sketches: equal where the fingerprints are, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.evidence.projection import fingerprint
from harness.evidence.trace import Sketch, Tensors
from harness.judge.reconstruct.inverse_projection import lift, projection_of, sample
from harness.judge.reconstruct.search import Search, residual_of

_Identity = tuple[int, tuple[int, ...], str]


class KnownTensors:
    """Every sketch that was met, with its tensor. The same bits are the same tensor object."""

    def __init__(self) -> None:
        self._tensors: dict[_Identity, Tensor] = {}
        self._owners: dict[_Identity, _Identity] = {}
        self._spreads: dict[_Identity, Tensor] = {}
        self._released: set[_Identity] = set()

    def search(
        self, recorded: Mapping[str, Any], rounding: Mapping[str, float], lengths: Mapping[str, float] | None = None
    ) -> Search:
        """Begin to look for what was recorded: whatever has a sketch of numbers, and was not found before."""
        given: dict[str, Tensor | Sketch] = {}
        for name, value in recorded.items():
            if not isinstance(value, Sketch):
                given[name] = value
            elif value.identity in self._tensors:
                given[name] = self._tensors[value.identity]
            elif math.isfinite(value.norm):
                given[name] = value
        return Search(given, rounding, lengths)

    def found(self, recorded: Mapping[str, Any], search: Search, sizes: Tensors) -> Tensors:
        """End a search. What was sketched differs from the best idea by entries of about ``sizes``."""
        tensors: Tensors = {}
        for name, value in recorded.items():
            if not isinstance(value, Sketch):
                tensors[name] = value
            elif value.identity in self._tensors:
                tensors[name] = self._tensors[value.identity]
            elif name not in search.sketches:
                # Which entries are not finite, a sketch does not say.
                tensors[name] = self._keep(value, torch.full(value.shape, math.nan, dtype=dtype_of(value)))
            else:
                tensors[name] = self._near(value, search.idea(name), sizes.get(name))
        return tensors

    def release(self, sketch: Sketch, rounding: Tensor | None) -> Tensor | None:
        """Return about how far each entry of what was found may be moved, the first time that it is asked.

        So only the first rank of those that were handed the same gradient may move it. What was found bit for bit may
        be moved by ``rounding``, for the sake of gradients before it that were not.
        """
        if sketch.identity in self._released:
            return None
        self._released.add(sketch.identity)
        return self._spreads.get(sketch.identity, rounding)

    def tensor(self, sketch: Sketch) -> Tensor:
        """Return what was found for a sketch."""
        return self._tensors[sketch.identity]

    def replace(self, sketch: Sketch, tensor: Tensor) -> Tensor:
        """Take another tensor for a sketch, and return it as it is now known."""
        return self._keep(sketch, tensor.to(dtype_of(sketch), copy=True))

    def _near(self, sketch: Sketch, idea: Tensor, sizes: Tensor | None) -> Tensor:
        rounded = idea.to(dtype_of(sketch), copy=True)
        if fingerprint(rounded) == sketch.fingerprint:
            return self._keep(sketch, rounded)
        if sizes is None or tuple(sizes.shape) != sketch.shape:
            sizes = torch.ones(sketch.shape, dtype=torch.float64)
        projection = projection_of(sketch.shape, sketch.numbers)
        difference, times = sample(residual_of(sketch, idea), projection, sizes, sketch.fingerprint, idea)
        # Once more for what the first solution rounded: it may be large, and the sketch is exact.
        difference += lift(residual_of(sketch, idea + difference), projection)
        self._spreads[sketch.identity] = sizes * times if math.isfinite(times) else difference.abs()
        return self._keep(sketch, (idea + difference).to(dtype_of(sketch)))

    def _keep(self, sketch: Sketch, tensor: Tensor) -> Tensor:
        _, shape, dtype = sketch.identity
        flat = tensor.view(-1)
        while self._owners.setdefault((fingerprint(tensor), shape, dtype), sketch.identity) != sketch.identity:
            # Other bits were found to be these by chance, and must not look alike: the last entry tells them apart.
            if not bool(flat[-1].isfinite()):
                break
            flat[-1] = torch.nextafter(flat[-1], torch.full_like(flat[-1], math.inf))
        self._tensors[sketch.identity] = tensor
        return tensor


def dtype_of(sketch: Sketch) -> torch.dtype:
    """Return the torch dtype of what was sketched."""
    dtype: torch.dtype = getattr(torch, sketch.dtype)
    return dtype
