"""The parameters of a joint forward: float64 leaves that are moved along directions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import as_real, segment
from plumbline.check.rank.memory_needed import is_free
from plumbline.recording.master_weights import shape_of
from plumbline.recording.observer import Facts
from plumbline.recording.sharding import arrival_leaves, distributed, gathered, is_run, laid_out_as, local, whole
from plumbline.replay.memory import address_of
from plumbline.replay.parameter_copies import ParameterCopies
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.random_state import normal
from plumbline.replay.unsharding import is_distributed

STEP = 1e-7
"""Distance by which weights are moved, relative to their size. float64 keeps nine digits of the difference, and few
units of a piecewise linear layer change sides."""

_KEPT = 5
"""Number of float64 copies of a rank's parameters: weights, weights before moving, a direction, and two gradients."""


class JointParameter:
    """A parameter as this rank holds it: the whole of it, a part by its DTensor's layout, or a shard of FSDP2.

    ``leaf``: the tensor that FSDP2 puts in the place of its shards while the module computes. ``scaled`` and
    ``clipped``: the factors by which its gradient was scaled and clipped since the backward passes. ``stage``: the
    pipeline stage that uses it, as far as known. ``is_tied``: the model held it in several places when it was built.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        leaf: Tensor | None = None,
        scaled: float = 1.0,
        clipped: float = 1.0,
        stage: str = "",
        *,
        is_tied: bool = False,
    ) -> None:
        self.name = name
        self.stage = stage
        self.is_tied = is_tied
        self.parameter = parameter
        self._scaled, self._clipped = scaled, clipped
        self._is_gathered = leaf is not None
        self._run: Tensor | None = None
        laid_out: Any = parameter if leaf is None else leaf
        self._layout = (laid_out.device_mesh, laid_out.placements) if is_distributed(laid_out) else None

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter, also if ZeRO 3 has released its values."""
        return shape_of(self.parameter)

    @property
    def ranks(self) -> list[int]:
        """The ranks that hold the parameter together: only this one if it is no DTensor."""
        mesh: Any = self.parameter
        if is_distributed(self.parameter):
            return [int(rank) for rank in mesh.device_mesh.mesh.flatten()]
        return [torch.distributed.get_rank()]

    @property
    def is_complete(self) -> bool:
        """Whether this rank has its whole part of the gradient."""
        return True

    def values(self) -> Tensor:
        """Return the values with which the module computes. All ranks that hold them must call this."""
        values = self._values()
        return self._laid_out(whole(values)) if self._is_gathered else values

    def _values(self) -> Tensor:
        if not is_run(self.parameter):
            return self.parameter.detach()
        if self._run is None:
            self._run = gathered(self.parameter)
        return self._run

    def gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient in float64, before scaling and clipping; None without one.

        All ranks that hold the parameter must call this.
        """
        received = self.received()
        return None if received is None else received / (self._scaled * self._clipped)

    def square(self, gradient: Tensor | None) -> float:
        """Return this rank's part of the squared norm that ``gradient`` had before it was clipped."""
        return 0.0 if gradient is None else float(gradient.square().sum()) * self._scaled**2 / self._copies

    def received(self) -> Tensor | None:
        """Return a copy of the gradient as the optimizer receives it, because the next backward pass may add to it."""
        if self.parameter.grad is None:
            return None
        gradient = self.parameter.grad.detach()
        gradient = self._laid_out(whole(gradient)) if self._is_gathered else laid_out_as(gradient, self.parameter)
        gradient = local(gradient)
        return as_real(gradient.to_dense() if gradient.is_sparse else gradient).to(torch.float64, copy=True)

    def described(self, gradient: Tensor | None) -> Facts:
        """Return this rank's description of the parameter, as JSON values.

        ``recorded``: the names by which it is recorded. ``size``: the root mean square of this rank's entries.
        ``weights`` and ``gradient``: projections. ``square``: a part of the gradient's squared norm. ``constant``: all
        entries are equal. ``copies``: how many of the ranks that hold the parameter together hold the same part.
        ``complete``: the gradient is complete.
        """
        values = as_real(local(self._values()))
        size = float(values.double().square().mean().sqrt()) if values.numel() else 0.0
        return {
            "name": self.name,
            "recorded": [self.name],
            "shape": list(self.shape),
            "ranks": self.ranks,
            "size": size if math.isfinite(size) else 0.0,
            "stage": self.stage,
            "tied": self.is_tied,
            "constant": bool((values == values.reshape(-1)[:1]).all()),
            "weights": segment(values).tolist(),
            "gradient": [] if gradient is None else segment(gradient).tolist(),
            "square": self.square(gradient),
            "copies": self._copies,
            "complete": self.is_complete,
        }

    def direction(self, seed: str, size: float) -> Tensor:
        """Return this rank's part of a direction with normal entries times ``size``, as real numbers."""
        digest = hashlib.blake2b(seed.encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        shape = (*self.shape, 2) if self.parameter.is_complex() else tuple(self.shape)
        along = normal(shape, generator, torch.float32).double().mul_(size)
        return local(self._laid_out(along.to(self.parameter.device)))

    def own_part(self, along: Tensor) -> Tensor:
        """Return the part of a direction along which this rank receives the gradient."""
        return along

    @property
    def _copies(self) -> int:
        if self._layout is None:
            return len(self.ranks)
        mesh, placements = self._layout
        parts: list[int] = [
            size for one, size in zip(placements, mesh.mesh.shape, strict=True) if not one.is_replicate()
        ]
        return len(self.ranks) // math.prod(parts)

    def _laid_out(self, values: Tensor) -> Tensor:
        if self._layout is None:
            return values
        return distributed(values, *self._layout)


class JointWeights(ParameterCopies):
    """Leaves for the parameters of joint forwards, which keep their layout and can be moved.

    ``gathered``: the tensors that FSDP2 puts in the places of its shards, also of shards that no optimizer updates.
    """

    def __init__(
        self, precision: ReplayPrecision, parameters: Iterable[JointParameter], gathered: Mapping[int, Tensor]
    ) -> None:
        super().__init__(precision)
        self._parameters = {id(one.parameter): one for one in parameters}
        self._gathered = gathered
        self._base: dict[int, Tensor] = {}

    def owner_of(self, tensor: Tensor) -> int | None:
        """Return the id of the parameter whose leaf lies in the memory of a tensor, None if there is none."""
        start = address_of(tensor)
        owners = (number for number, (_, leaf) in self._copies.items() if address_of(local(leaf)) == start)
        return next(owners, None) if start else None

    def _values(self, parameter: nn.Parameter) -> Tensor:
        one = self._parameters.get(id(parameter))
        return (one or JointParameter("", parameter, self._gathered.get(id(parameter)))).values()

    def move(self, directions: Mapping[int, Tensor], length: float) -> None:
        """Set each leaf to its parameter's values, plus ``length`` times its direction if it has one."""
        with torch.no_grad():
            for number, (_, leaf) in self._copies.items():
                if number in directions or number in self._base:  # the others have never been moved
                    own = as_real(local(leaf))
                    base = self._base.setdefault(number, own.detach().clone())
                    own.copy_(base)
                    if number in directions:
                        own.add_(directions[number], alpha=length)


def has_memory_for(held: Sequence[JointParameter]) -> bool:
    """Return whether this rank has memory for the joint forward's copies of parameters, and to gather each."""
    if not held:
        return True
    sizes = [one.shape.numel() if is_run(one.parameter) else local(one.parameter).numel() for one in held]
    largest = max(one.shape.numel() for one in held)
    return is_free(8 * (_KEPT * sum(sizes) + 2 * largest), held[0].parameter.device)


def leaves_of(roots: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Return the tensors that FSDP2 puts in the places of shards, by the ids of the shards."""
    return {id(shard): leaf for shard, leaf in arrival_leaves(roots)}


def product(gradient: Tensor | None, along: Tensor, copies: int) -> tuple[float, float]:
    """Return this rank's part of the inner product of a gradient and a direction, and of its squared terms' sum."""
    if gradient is None:
        return 0.0, 0.0
    terms = gradient * along
    return float(terms.sum()) / copies, float(terms.square().sum()) / copies
