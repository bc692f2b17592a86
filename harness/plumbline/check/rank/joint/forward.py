"""One evaluation of S: every rank runs its recorded calls again, at weights of its own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbline.check.rank.joint.exchange import NoAgreementError
from plumbline.check.rank.joint.weights import JointWeights
from plumbline.recording.sharding import whole
from plumbline.replay import agreement
from plumbline.replay.call import TrackedCall, sample
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.replay import forward_together
from plumbline.replay.replay_modes import Rounding


@dataclass(frozen=True)
class RecordedCall:
    """A call and what arrived at its outputs, by the numbers of backward passes, with the loss scales of these."""

    call: TrackedCall
    cotangents: Mapping[int, Sequence[Tensor | None]]
    scales: Mapping[int, float]


class JointForward:
    """The calls of this rank since the last step, in their order."""

    def __init__(self, calls: Sequence[RecordedCall], weights: JointWeights) -> None:
        self._calls = calls
        self._weights = weights
        self._drawn: list[list[torch.dtype] | None] = [None] * len(calls)
        self.passes = sorted({number for one in calls for number in one.cotangents})
        self.magnitude = 0.0
        """The sum of ‖output‖ · ‖what arrived at it‖, which S cannot exceed."""

    def rehearse(self, native: JointWeights) -> list[float]:
        """Run the calls in the training's own precision and in float64, and return this rank's terms of S, by pass.

        Raises:
            NoAgreementError: outputs are not those of the script.
        """
        outputs = []
        for place, one in enumerate(self._calls):
            own, self._drawn[place] = forward_together(one.call, ReplayPrecision.NATIVE, native)
            outputs.append(tuple(map(sample, own)))
        exact: list[list[Tensor]] = []
        terms = self.terms(kept=exact)
        for one, native_outputs, right in zip(self._calls, outputs, exact, strict=True):
            if not agreement.reproduces(one.call.outputs, native_outputs, tuple(map(sample, right)), one.call.eps):
                raise NoAgreementError(f"{one.call.name}: run again, its forward gave another result")
        return terms

    def terms(self, rounding: Rounding | None = None, kept: list[list[Tensor]] | None = None) -> list[float]:
        """Return this rank's terms of S at the present weights, by pass."""
        found = dict.fromkeys(self.passes, 0.0)
        magnitude = 0.0
        for one, drawn in zip(self._calls, self._drawn, strict=True):
            outputs, _ = forward_together(one.call, ReplayPrecision.FLOAT64, self._weights, drawn, rounding)
            if kept is not None:
                kept.append(outputs)
            for number, cotangents in one.cotangents.items():
                for output, cotangent in zip(outputs, cotangents, strict=True):
                    if cotangent is not None:
                        ours, theirs = whole(output), whole(cotangent).to(output.dtype)
                        found[number] += _product(ours, theirs) / one.scales.get(number, 1.0)
                        magnitude += float(ours.norm() * theirs.norm()) / one.scales.get(number, 1.0)
        self.magnitude = max(self.magnitude, magnitude)
        return [found[number] for number in self.passes]


def recorded_calls(calls: Sequence[TrackedCall], scales: Mapping[int, float]) -> list[RecordedCall]:
    """Return calls with what has arrived at their outputs so far."""
    return [RecordedCall(one, dict(one.cotangents), scales) for one in calls]


def unit_of(calls: Sequence[RecordedCall]) -> float:
    """Return the unit roundoff of the coarsest format in which the calls compute."""
    return max((one.call.eps for one in calls), default=0.0) / 2


def _product(ours: Tensor, theirs: Tensor) -> float:
    if ours.is_complex():
        return float((torch.view_as_real(ours.resolve_conj()) * torch.view_as_real(theirs.resolve_conj())).sum())
    return float((ours * theirs).sum())
