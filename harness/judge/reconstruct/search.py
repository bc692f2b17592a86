"""The search for what a set of tensors was, of which sketches are left: candidates are tried, or mixed, one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from harness.evidence.trace import Sketch, Tensors
from harness.judge.oracle.noise import norm
from harness.judge.reconstruct.inverse_projection import projection_of

NEAR = 4.0
"""A candidate so many roundings away is not doubted."""

SPARE = 8
"""Equations that a mixture must have left over once its weights are chosen: otherwise it fits anything."""


SIGNIFICANT = 5.0
"""A factor that is so many standard deviations from one is not one by chance."""


class Search:
    """What is looked for: ``given``, in which some are sketches, and the error of each that ``rounding`` explains.

    The best candidate so far is kept for each tensor by itself. ``lengths`` are those of what is right: a candidate
    that is longer rounds more.
    """

    def __init__(
        self,
        given: Mapping[str, Tensor | Sketch],
        rounding: Mapping[str, float],
        lengths: Mapping[str, float] | None = None,
    ) -> None:
        self.given = given
        self.sketches = {name: value for name, value in given.items() if isinstance(value, Sketch)}
        self._rounding = rounding
        self._lengths = lengths or {}
        self._best: Tensors = {}
        self._errors: dict[str, float] = {}
        self._offered: dict[str, float] = {}

    def doubtful(self, limit: float = NEAR) -> list[str]:
        """Return the sketches to which nothing that was offered comes as near as ``limit`` times rounding."""
        return [name for name in self.sketches if self._offered.get(name, math.inf) > limit]

    def open(self, limit: float) -> list[str]:
        """Return the sketches to which nothing comes so near, mixtures included."""
        return [name for name in self.sketches if self._errors.get(name, math.inf) > limit]

    def idea(self, name: str) -> Tensor:
        """Return the best candidate for a sketch: zero, if there is no better one."""
        return self._best[name] if name in self._best else torch.zeros(self.sketches[name].shape, dtype=torch.float64)

    def ideas(self) -> Tensors:
        """Return the best candidate for every tensor; what is known is what it is."""
        return {n: self.idea(n) if isinstance(value, Sketch) else value for n, value in self.given.items()}

    def try_all(self, *candidates: Tensors) -> None:
        """Try every one of some candidates, and keep the nearest; one that lacks a tensor means zero."""
        for candidate in candidates:
            for name in self.sketches:
                self._offer(name, candidate)

    def offer(self, candidates: Iterable[Tensors]) -> None:
        """Try candidates in order, until nothing is doubtful."""
        for candidate in candidates:
            doubtful = self.doubtful()
            if not doubtful:
                return
            for name in doubtful:
                self._offer(name, candidate)

    def _offer(self, name: str, candidate: Mapping[str, Tensor | None]) -> None:
        self._offered[name] = min(self._try(name, candidate.get(name)), self._offered.get(name, math.inf))

    def mix(self, atoms: Sequence[Tensors]) -> None:
        """Try the best weighted sum of atoms for all tensors together, where nothing is near yet."""
        names = self._far()
        weights = self._fit(atoms, [name for name in self.given if name in self._rounding]) if names else None
        if weights is not None:
            for name in names:
                self._try(name, _sum(atoms, weights, name))
                self._offer(name, {name: _sum(atoms, _simple(weights), name)})

    def scale(self, atom: Tensors) -> None:
        """Try a multiple of one candidate, if all tensors together say that it is not the candidate itself."""
        weights = self._fit([atom], [name for name in self.given if name in self._rounding])
        if weights is None or not self.sketches:
            return
        errors, lengths = [], []
        for factor in (1.0, *weights):
            multiple = {name: factor * atom[name] for name in self.sketches if name in atom}
            units = {name: self._rounding.get(name) or 1.0 for name in multiple}
            errors.append(sum((norm(residual_of(self.sketches[n], v)) / units[n]) ** 2 for n, v in multiple.items()))
            lengths.append(sum(self.sketches[name].numbers for name in multiple))
        if errors[0] - errors[1] > SIGNIFICANT**2 * errors[1] / max(lengths[1], 1):
            self.try_all(multiple)

    def mix_each(self, atoms: Sequence[Tensors]) -> None:
        """Try the best weighted sum of atoms for each tensor by itself, where nothing is near yet."""
        for name in self._far():
            own = [atom for atom in atoms if name in atom]
            weights = self._fit(own, [name])
            if weights is not None:
                self._try(name, _sum(own, weights, name))
                self._offer(name, {name: _sum(own, _simple(weights), name)})

    def _far(self) -> list[str]:
        return [name for name in self.doubtful() if self._errors.get(name, math.inf) > NEAR]

    def _try(self, name: str, value: Tensor | None) -> float:
        """Return how far a candidate is from the sketch, in multiples of rounding."""
        sketch = self.sketches[name]
        if value is None:
            value = torch.zeros(sketch.shape, dtype=torch.float64)
        if tuple(value.shape) != sketch.shape:
            return math.inf
        right = self._lengths.get(name, 0.0)
        rounding = self._rounding.get(name, 0.0) * (max(1.0, norm(value) / right) if right else 1.0)
        distance = norm(residual_of(sketch, value))
        if not math.isfinite(distance):
            return math.inf
        error = distance / rounding if rounding else math.inf if distance else 0.0
        if error < self._errors.get(name, math.inf) or name not in self._best:
            self._errors[name] = error
            self._best[name] = value.double()
        return error

    def _fit(self, atoms: Sequence[Tensors], names: Sequence[str]) -> list[float] | None:
        rows = sum(_length(self.given[name]) for name in names)
        if not atoms or rows < len(atoms) + SPARE:
            return None
        wanted, columns = [], []
        for name in names:
            given = self.given[name]
            # In multiples of rounding, so that small tensors count as much as large ones.
            unit = self._rounding.get(name) or 1.0
            wanted.append(_seen(given, given) / unit)
            columns.append(torch.stack([_seen(atom.get(name), given) for atom in atoms], dim=1) / unit)
        matrix, right = torch.cat(columns), torch.cat(wanted)
        lengths = torch.linalg.vector_norm(matrix, dim=0)
        if not bool(torch.isfinite(right).all() and torch.isfinite(lengths).all()):
            return None
        lengths = torch.where(lengths > 0, lengths, 1.0)
        solution = torch.linalg.lstsq(matrix / lengths, right[:, None], driver="gelsd").solution[:, 0] / lengths
        weights: list[float] = solution.tolist()
        return weights


def residual_of(sketch: Sketch, candidate: Tensor) -> Tensor:
    """Return the projection of what a candidate lacks."""
    leading, trailing = projection_of(sketch.shape, sketch.numbers).of(candidate)
    residual: Tensor = (sketch.values[0] - leading) + (sketch.values[1:].sum(0) - trailing)
    return residual


def _length(value: Tensor | Sketch) -> int:
    return value.numbers if isinstance(value, Sketch) else value.numel()


def _seen(value: Tensor | Sketch | None, given: Tensor | Sketch) -> Tensor:
    """Return a tensor as the evidence of it would be: projected where ``given`` is a sketch."""
    if isinstance(value, Sketch):
        return value.values.sum(0)
    shape = tuple(given.shape)
    if value is None or tuple(value.shape) != shape:
        value = torch.zeros(shape, dtype=torch.float64)
    if isinstance(given, Sketch):
        return projection_of(shape, given.numbers).of(value).sum(0)
    return value.double().reshape(-1)


def _simple(weights: Sequence[float]) -> list[float]:
    """Return the simple fractions that are near to weights: what a mistake puts together has such weights mostly."""
    return [float(Fraction(weight).limit_denominator(64)) for weight in weights]


def _sum(atoms: Sequence[Tensors], weights: Sequence[float], name: str) -> Tensor | None:
    total: Tensor | None = None
    for atom, weight in zip(atoms, weights, strict=True):
        if name in atom:
            value = weight * atom[name].double()
            total = value if total is None else total + value
    return total
