"""Evaluates S: every rank runs its recorded calls again, with moved weights.

S is the sum over ranks and backward passes of the inner products of the outputs of the ranks' recorded forwards with
the gradients that arrived at these outputs. Inputs of custom functions whose backward adds a gradient count likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.check.rank.joint.own_shards import gathered_over_others
from plumbline.check.rank.joint.weights import JointWeights
from plumbline.check.rank.store_exchange import NoAgreementError
from plumbline.recording.sharding import reduction_dtypes, whole
from plumbline.replay import agreement
from plumbline.replay.call import TrackedCall, sample
from plumbline.replay.derivatives import Constants, InPlace, OwnDerivativeError, UnrepeatableError
from plumbline.replay.function_derivatives import Terms
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.reasons import COMPILED_DRAWS
from plumbline.replay.replay import forward_together
from plumbline.replay.replay_modes import Rounding
from plumbline.replay.unsharding import computing_dtypes


@dataclass(frozen=True)
class RecordedCall:
    """A call, the gradients that arrived at its outputs, and the loss scales, by the numbers of backward passes.

    ``apart``: the dimensions of the mesh along which each rank's loss uses only its own shard of the outputs.
    """

    call: TrackedCall
    cotangents: Mapping[int, Sequence[Tensor | None]]
    scales: Mapping[int, float]
    apart: frozenset[int] = frozenset()

    def counted(self, output: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of an output, and of the gradient at it, that this rank counts in S."""
        placements = getattr(output, "placements", None)
        if not self.apart or placements is None:
            return whole(output), whole(cotangent)
        ours, theirs = (gathered_over_others(one, placements, self.apart) for one in (output, cotangent))
        return ours, theirs


class JointForward:
    """The calls of this rank since the last step, in order.

    ``magnitude``: the sum of ‖output‖ · ‖gradient that arrived‖, a bound of this rank's part of S. ``spread``: the
    relative distance of the training's outputs from exact ones. ``unrepeatable``: the name of a custom function that
    cannot run again alone, so its backward cannot be verified; "" if all can.
    """

    def __init__(self, calls: Sequence[RecordedCall], weights: JointWeights) -> None:
        self._calls = calls
        self._weights = weights
        self._drawn: list[list[torch.dtype] | None] = [None] * len(calls)
        self._constants = [Constants() for _ in calls]
        self._rough_constants = [Constants(one.gradients) for one in self._constants]
        self.passes = sorted({number for one in calls for number in one.cotangents})
        self.magnitude = 0.0
        self.spread = 0.0
        self.unrepeatable = ""

    def rehearse(self, native: JointWeights, *, verify: bool = True) -> list[float]:
        """Run the calls in the training's own precision and in float64, and return this rank's terms of S, by pass.

        Raises:
            NoAgreementError: outputs differ from the script's, or the forward defines its own derivative, or it has a
                function that cannot be verified.
        """
        rounded = []
        for index, one in enumerate(self._calls):
            own, self._drawn[index] = forward_together(one.call, ReplayPrecision.NATIVE, native)
            rounded.append(tuple(map(sample, own)))
        try:
            exact = [
                forward_together(
                    one.call, ReplayPrecision.FLOAT64, self._weights, self._drawn[index], constants, verify=verify
                )[0]
                for index, (one, constants) in enumerate(zip(self._calls, self._constants, strict=True))
            ]
        except UnrepeatableError as error:
            self.unrepeatable = str(error)
            self._constants = [Constants() for _ in self._calls]
            self._rough_constants = [Constants(one.gradients) for one in self._constants]
            raise NoAgreementError(f"{error} cannot run again alone") from error
        except OwnDerivativeError as error:
            raise NoAgreementError(str(error)) from error
        for index, (one, own_outputs, right) in enumerate(zip(self._calls, rounded, exact, strict=True)):
            samples = tuple(map(sample, right))
            if not agreement.reproduces(one.call.outputs, own_outputs, samples, one.call.eps):
                draws = one.call.compiled and self._drawn[index]
                why = COMPILED_DRAWS if draws else "its forward returned a different result when it was run again"
                raise NoAgreementError(f"{one.call.name}: {why}")
            self.spread = max(self.spread, agreement.distance(own_outputs, samples))
        return self._terms(exact, self._constants)

    @property
    def changes_in_place(self) -> bool:
        """Whether collectives of this rank's calls change tensors that have a gradient."""
        return any(one.changes_in_place for one in self._constants)

    @property
    def receives_constants(self) -> bool:
        """Whether calls combine tensors that have a gradient with what other collectives return without one."""
        return any(one.receives for one in self._constants)

    @property
    def adds_gradients(self) -> set[str]:
        """The names of custom functions that add gradients of their own in the backward pass."""
        return {name for one in self._constants for name in one.gradients.names.values()}

    def take(self, in_place: InPlace, *, derives: bool) -> None:
        """Set what collectives add in place, and whether received values are differentiated."""
        for one in (*self._constants, *self._rough_constants):
            one.in_place, one.derives = in_place, derives

    def rehearse_roughly(self, unit: float) -> list[float]:
        """Run the calls in float64 with simulated rounding at this unit roundoff, and return the terms of S."""
        return self._terms(self._outputs(self._rough_constants, (unit, 0)), self._rough_constants)

    def exchanges(self) -> list[tuple[str, Terms]]:
        """Return the communicating functions in these calls, with this rank's terms of their derivatives."""
        found: list[tuple[str, Terms]] = []
        for index, one in enumerate(self._calls):
            forward_together(
                one.call,
                ReplayPrecision.FLOAT64,
                self._weights,
                self._drawn[index],
                Constants(),
                exchanged=lambda name, terms: found.append((name, terms)),
            )
        return found

    def terms(self, rounding: tuple[float, int] | None = None) -> list[float]:
        """Return this rank's terms of S at the current weights, by pass; see ``rehearse_roughly``.

        ``rounding``: the unit roundoff of simulated errors, and the number of the simulation.
        """
        constants = self._constants if rounding is None else self._rough_constants
        for one in constants:
            one.replay()
        return self._terms(self._outputs(constants, rounding), constants)

    def _outputs(self, constants: Sequence[Constants], rounding: tuple[float, int] | None) -> list[list[Tensor]]:
        return [
            forward_together(
                one.call,
                ReplayPrecision.FLOAT64,
                self._weights,
                self._drawn[index],
                constants[index],
                None if rounding is None else Rounding(rounding[0], index + rounding[1] * len(self._calls)),
            )[0]
            for index, one in enumerate(self._calls)
        ]

    def _terms(self, outputs: Sequence[Sequence[Tensor]], constants: Sequence[Constants]) -> list[float]:
        found = dict.fromkeys(self.passes, 0.0)
        magnitude = 0.0
        for one, own, other in zip(self._calls, outputs, constants, strict=True):
            added, size = other.added()
            for number, cotangents in one.cotangents.items():
                scale = one.scales.get(number, 1.0)
                if any(cotangent is not None for cotangent in cotangents):
                    found[number] += added / scale
                    magnitude += size / scale
                for output, cotangent in zip(own, cotangents, strict=True):
                    if cotangent is not None:
                        ours, theirs = one.counted(output, cotangent.to(output.dtype))
                        found[number] += _product(ours, theirs) / scale
                        magnitude += float(ours.norm() * theirs.norm()) / scale
        self.magnitude = max(self.magnitude, magnitude)
        return [found[number] for number in self.passes]


def recorded_calls(calls: Sequence[TrackedCall], scales: Mapping[int, float]) -> list[RecordedCall]:
    """Return calls with the gradients that have arrived at their outputs so far."""
    return [RecordedCall(one, dict(one.cotangents), scales) for one in calls]


def unit_of(calls: Sequence[RecordedCall]) -> float:
    """Return the unit roundoff of the coarsest format in which the calls compute."""
    roots = [one.call.module for one in calls]
    sharded = [dtype for root in roots for dtype in computing_dtypes(root).values()]
    formats = [one for one in (*sharded, *reduction_dtypes(roots).values()) if one.is_floating_point]
    return max([one.call.eps for one in calls] + [torch.finfo(one).eps for one in formats], default=0.0) / 2


def _product(ours: Tensor, theirs: Tensor) -> float:
    if ours.is_complex():
        return float((torch.view_as_real(ours.resolve_conj()) * torch.view_as_real(theirs.resolve_conj())).sum())
    return float((ours * theirs).sum())
