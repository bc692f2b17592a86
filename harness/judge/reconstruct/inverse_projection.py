"""Projections the other way round: tensors that leave a given sketch, and look otherwise like what is expected.

What is not known of a tensor is drawn at random, each entry as large as it is expected to be, and then moved as little
as possible, in multiples of those sizes, until it leaves the sketch: a sample of what is possible (Matheron's rule).
So its length is honest, and entries that are expected to be zero stay zero.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from harness.evidence.projection import ROWS, SCALE, chunk_factors, halves, project, row_weights, rows_of_chunk

_FEW = 2**18
"""Weights that are kept as one matrix, at most."""

_RANK = 1e-11
"""Directions that hold less than this part of the largest one are not seen by a sketch."""


@lru_cache(maxsize=256)
def projection_of(shape: tuple[int, ...], numbers: int) -> Projection:
    """Return the projection of tensors of one shape to so many numbers."""
    return Projection(shape, numbers)


class Projection:
    """P for tensors of one shape, as a linear operator. Values are ``numbers`` long, as those of a sketch are."""

    def __init__(self, shape: tuple[int, ...], numbers: int) -> None:
        self.shape = shape
        self.numbers = numbers
        self.count = math.prod(shape)
        self.columns = numbers // ROWS
        self.rows = rows_of_chunk(self.count, self.columns)
        self.chunks = -(-self.count // (self.rows * self.columns))
        cpu = torch.device("cpu")
        self.weights = row_weights(cpu)[:, : self.rows] * SCALE
        self.factors = chunk_factors(0, self.chunks, self.columns, cpu)

    def of(self, tensor: Tensor) -> Tensor:
        """Return P x as exactly as a sketch has it, in halves."""
        if self._matrix is None:
            return project(tensor.double(), self.numbers)
        return torch.stack([self._matrix @ half for half in halves(tensor.double().reshape(-1), torch.float64)])

    @cached_property
    def _matrix(self) -> Tensor | None:
        """All weights, where they are few: many small tensors are met in the tests of the judge."""
        if self.count * self.numbers > _FEW:
            return None
        matrix = torch.zeros(ROWS, self.columns, self.chunks, self.rows, self.columns, dtype=torch.float64)
        each = self.weights[:, None, :, None] * self.factors.permute(1, 0, 2)[:, :, None]
        matrix.diagonal(dim1=1, dim2=4).copy_(each)
        return matrix.view(self.numbers, -1)[:, : self.count].contiguous()

    def apply(self, tensor: Tensor) -> Tensor:
        """Return P x. For differences: it rounds like any sum in float64."""
        return ((self.weights @ self._in_chunks(tensor)) * self.factors).sum(0).reshape(-1)

    def spread(self, values: Tensor) -> Tensor:
        """Return Pᵀ v."""
        chunks = self.weights.T @ (self.factors * values.view(ROWS, self.columns))
        return chunks.reshape(-1)[: self.count].view(self.shape)

    def gram(self, squares: Tensor) -> Tensor:
        """Return P diag(``squares``) Pᵀ, which is one matrix (ROWS, ROWS) a column."""
        pairs = (self.weights[:, None] * self.weights[None]).view(ROWS * ROWS, self.rows)
        factors = (self.factors[:, :, None] * self.factors[:, None]).view(-1, ROWS * ROWS, self.columns)
        summed = ((pairs @ self._in_chunks(squares)) * factors).sum(0)
        return summed.view(ROWS, ROWS, self.columns).permute(2, 0, 1)

    def by_column(self, values: Tensor) -> Tensor:
        """Return values as (columns, ROWS)."""
        return values.view(ROWS, self.columns).T

    def _in_chunks(self, tensor: Tensor) -> Tensor:
        padded = torch.zeros(self.chunks * self.rows * self.columns, dtype=torch.float64)
        padded[: self.count] = tensor.reshape(-1)
        return padded.view(self.chunks, self.rows, self.columns)


def lift(values: Tensor, projection: Projection, sizes: Tensor | None = None) -> Tensor:
    """Return the least tensor, in multiples of ``sizes``, whose projection is ``values``."""
    squares = torch.ones(projection.shape, dtype=torch.float64) if sizes is None else sizes.double().square()
    return squares * projection.spread(_solve(_inverse(projection.gram(squares)), values, projection))


def sample(
    residual: Tensor, projection: Projection, sizes: Tensor, seed: int, across: Tensor | None = None
) -> tuple[Tensor, float]:
    """Return a tensor whose projection is ``residual``, and by which number its entries are larger than ``sizes``.

    Where sizes are zero and the residual says that something is there all the same, all entries may be something.
    What is drawn is orthogonal to ``across``, if given: a factor of that is seen, or it is not there.
    """
    squares = sizes.double().square()
    inverse = _inverse(projection.gram(squares))
    solved = _solve(inverse, residual, projection)
    times = math.sqrt(max(float(residual @ solved), 0.0) / min(projection.numbers, projection.count))
    drawn = sizes.double() * _normal(projection.shape, seed) * times
    if across is not None and bool(across.any()):
        drawn -= across * (float((drawn * across).sum()) / float((across * across).sum()))
    drawn += squares * projection.spread(_solve(inverse, residual - projection.apply(drawn), projection))
    left = residual - projection.apply(drawn)
    if float(left.norm()) > 1e-6 * float(residual.norm()):
        everywhere = torch.ones_like(drawn)
        if bool((sizes == 0).any()):
            return drawn + sample(left, projection, everywhere, seed)[0], math.inf
    return drawn, times


def correction(
    residual: Tensor, projection: Projection, slope: Tensor, sizes: Tensor, others: Tensor
) -> tuple[Tensor, float]:
    """Return the likeliest change d with P d = 0 and P (slope · d + e) = ``residual``, and how surprising that is.

    ``sizes`` are those of d, ``others`` those of an error e that comes on top. The surprise is 1 on average.
    """
    d2, e2 = sizes.double().square(), others.double().square()
    total = float(d2.sum())
    # P d is zero, so the mean slope says nothing; without it little cancels.
    slope = slope - (float((slope * d2).sum()) / total if total else 0.0)
    inverse = _inverse(projection.gram(d2))
    mixed = projection.gram(d2 * slope)
    unseen = projection.gram(d2 * slope.square() + e2) - mixed @ inverse @ mixed
    seen = projection.by_column(residual)[..., None]
    solved = _inverse(unseen) @ seen
    surprise = math.sqrt(max(float((seen * solved).sum()), 0.0) / min(projection.numbers, projection.count))
    first, second = (part.squeeze(-1).T.reshape(-1) for part in (-inverse @ (mixed @ solved), solved))
    return d2 * (projection.spread(first) + slope * projection.spread(second)), surprise


def _inverse(gram: Tensor) -> Tensor:
    inverse: Tensor = torch.linalg.pinv(gram, rtol=_RANK, hermitian=True)
    return inverse


def _solve(inverse: Tensor, values: Tensor, projection: Projection) -> Tensor:
    solved: Tensor = inverse @ projection.by_column(values)[..., None]
    return solved.squeeze(-1).T.reshape(-1)


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed & (2**63 - 1)), dtype=torch.float64)
