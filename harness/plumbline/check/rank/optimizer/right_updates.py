"""The right updates of parameters that are replayed together, and their comparison with the actual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import as_real, segment
from plumbline.check.rank.optimizer.optimizer_replay import ReplayedStep, is_of_torch
from plumbline.check.rank.optimizer.twin import is_finite
from plumbline.recording.sharding import local


@dataclass(frozen=True, eq=False)
class RightUpdates:
    """Parameters of one dtype before their step. All values are real numbers: a complex entry counts as two.

    ``numbers``: the parameters' numbers in the optimizer. ``before``: the weights of all of them, one after the other.
    ``finite``: where they are finite, None if all are. DeepSpeed pads partitions with memory that it does not
    initialize, which can hold NaN. ``right`` and ``native``: segments of the right updates, and of those in the
    parameters' own precision. ``native`` is None if the optimizer's class is one of torch's own, unless the class
    itself ``lowers`` the precision. ``noise``: the largest error of each update that rounding explains;
    ``unit``: half a unit in the last place at its size.
    """

    numbers: Sequence[int]
    shapes: Sequence[torch.Size]
    before: Tensor
    finite: Tensor | None
    right: Sequence[Tensor]
    native: Sequence[Tensor] | None
    noise: Sequence[float]
    unit: Sequence[float]
    lowers: bool

    @staticmethod
    def of(
        optimizer: Optimizer, numbers: Sequence[int], parameters: Sequence[Tensor], after: Sequence[ReplayedStep]
    ) -> RightUpdates:
        """Return the right updates of ``parameters`` from the replays ``after`` of their step."""
        before = _joined(parameters, copied=True)
        finite = None if is_finite(before) else before.isfinite()
        sizes = [as_real(local(one)).numel() for one in parameters]
        weights, exact = (_masked(one, finite) for one in (before, _joined([one.exact for one in after])))
        roundings = ([one.native for one in after], [one.traced for one in after if one.traced is not None])
        rough = [_masked(_joined(one), finite) for one in roundings if one]
        distances = [_norms(torch.split(one - exact, sizes)) for one in rough]
        update = exact - weights
        # A copy of a class that is not torch's own must reproduce the step, or its replay in float64 proves nothing.
        judged_natively = after[0].lowered or not is_of_torch(optimizer)
        native = _segments(rough[0].double() - weights, before.dtype, sizes) if judged_natively else None
        lengths = zip(*(_norms(torch.split(one, sizes)) for one in (weights.double(), update)), strict=True)
        lowers = after[0].lowered and is_of_torch(optimizer)
        unit = [(old + moved) * torch.finfo(before.dtype).eps / 2 for old, moved in lengths]
        return RightUpdates(
            numbers, [local(one).shape for one in parameters], before, finite,
            _segments(update, before.dtype, sizes), native,
            [max(each) for each in zip(unit, *distances, strict=True)], unit, lowers,
        )  # fmt: skip

    def rows(self, parameters: Sequence[Tensor]) -> list[list[float]]:
        """Compare the optimizer's ``parameters`` after the step: return a row for each, as ``UpdateReplay`` describes.

        There are none if the step changed a shape.
        """
        own = [parameters[number] for number in self.numbers]
        if [local(one).shape for one in own] != self.shapes:
            return []
        sizes = [as_real(local(one)).numel() for one in own]
        old, new = (_masked(one, self.finite) for one in (self.before, _joined(own)))
        made = _segments(new.double() - old, self.before.dtype, sizes)
        error, right, moved = _norms(_differences(made, self.right)), _norms(self.right), _norms(made)
        along = [float(one @ other) for one, other in zip(made, self.right, strict=True)]
        repeated = [0.0] * len(own) if self.native is None else _norms(_differences(made, self.native))
        columns = self.numbers, error, self.noise, right, moved, along, repeated, self.unit
        return [list(row) for row in zip(*columns, strict=True)]


def _joined(tensors: Sequence[Tensor], *, copied: bool = False) -> Tensor:
    flat = [as_real(local(one.detach())).reshape(-1) for one in tensors]
    return torch.cat(flat) if copied or len(flat) > 1 else flat[0]


def _masked(values: Tensor, finite: Tensor | None) -> Tensor:
    """Return values, with 0 where the weights before the step were not finite."""
    return values if finite is None else values.masked_fill(~finite, 0)


def _segments(updates: Tensor, dtype: torch.dtype, sizes: list[int]) -> list[Tensor]:
    """Return the segments of float64 updates of weights of a dtype.

    Projecting float32 numbers is far cheaper. This rounds an update by no more than adding it to the weights does,
    unless the weights are float64.
    """
    return [segment(one) for one in torch.split(updates if dtype == torch.float64 else updates.float(), sizes)]


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    return [float(one) for one in torch._foreach_norm(list(tensors))]


def _differences(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    return [one - other for one, other in zip(left, right, strict=True)]
