"""Gradients as they were before a function clipped them, or before the script changed them with its own code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer_gradients import gathered, kept
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.recording.backward_passes import PassGradients
from plumbline.recording.flat_sharding import FlatUnit, part_of
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import ParameterNames, parameters_of
from plumbline.recording.pause import paused
from plumbline.recording.sharding import is_shard

_ROUNDINGS = 8


class UnclippedGradients(Observer):
    """Keeps the segments of gradients as they were before clipping, from a backward pass until the next pass or step.

    ``whole`` has whole gradients of parameters that no module holds. They can be copies of pieces of the model's.
    """

    name = "unclipped"
    essential = True

    def __init__(
        self, optimizers: KnownOptimizers, names: ParameterNames, sample: ParameterSample, loss_scale: LossScale
    ) -> None:
        self._names = names
        self._optimizers = optimizers
        self._sample = sample
        self._loss_scale = loss_scale
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self.whole: dict[int, Tensor] = {}
        self._shards: dict[int, Tensor] = {}
        self._after_backward: dict[int, Tensor] = {}
        self._keeps_after_backward = False
        self._before_pass = PassGradients()
        self._known: Sequence[dict[int, Tensor]] = ()

    def note(self, parameters: Sequence[Tensor]) -> None:
        if not self.recording:
            return
        scales = self._scales()
        other = {id(one) for opt in self._optimizers for one in parameters_of(opt) if not self._names.knows(one)}
        with torch.no_grad(), paused():
            for one in parameters:
                if one.grad is None or id(one) in self._shards or self._knows(one, scales.get(id(one), 1.0)):
                    continue
                if part_of(one) is not None:  # not all ranks may be here, so nothing can be gathered
                    self._shards[id(one)] = one.grad / scales.get(id(one), 1.0)
                elif self._sample.has(one):
                    self._before[id(one)] = kept(one.grad) / scales.get(id(one), 1.0)
                    if id(one) in other:
                        self.whole[id(one)] = one.grad.detach() / scales[id(one)]

    def keep_after_backward(self) -> None:
        """From now on, also keep what each backward pass leaves.

        That takes time, and is of use only if the script changes gradients itself.
        """
        self._keeps_after_backward = True

    def note_clipped(self, parameters: Sequence[Tensor]) -> None:
        """Record the same gradients after they were clipped."""
        scales = self._scales()
        with torch.no_grad(), paused():
            for one in parameters:
                if one.grad is not None and id(one) in self._before:
                    self._after[id(one)] = kept(one.grad) / scales.get(id(one), 1.0)

    def _knows(self, parameter: Tensor, scale: float) -> bool:
        """Return whether a gradient was recorded before, and is still what clipping left."""
        after = self._after.get(id(parameter))
        if after is None:
            return id(parameter) in self._before
        assert parameter.grad is not None
        return _as_clipped([kept(parameter.grad) / scale], [after], _rounding([parameter])) is not None

    def _scales(self) -> dict[int, float]:
        return {id(one): self._loss_scale.pending_scale(opt) for opt in self._optimizers for one in parameters_of(opt)}

    def factor(self, parameter: Tensor) -> float:
        """Return the factor by which clipping has shortened a parameter's gradient; 1 if it was not clipped."""
        before, after = self._before.get(id(parameter)), self._after.get(id(parameter))
        if before is None or after is None or parameter.grad is None or not bool(before.any()):
            return 1.0
        if _as_clipped([kept(parameter.grad)], [after], _rounding([parameter])) is None:
            return 1.0
        return float(after.norm() / before.norm())

    def vectors(
        self, parameters: Sequence[Tensor], received: Sequence[Tensor], units: Sequence[FlatUnit]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return ``unclipped``, ``replaced`` and ``after_backward`` of a ``RecordedStep``.

        If the script has multiplied all gradients by one factor since clipping, ``unclipped`` includes this factor.
        Gradients in flat ``units`` are gathered, so all ranks have to call this.
        """
        known = self._of_flat(units)
        replaced: dict[int, Tensor] = {}
        clipped = [(one, given) for one, given in zip(parameters, received, strict=True) if id(one) in self._after]
        before = [self._before[id(one)] for one, _ in clipped]
        after = [self._after[id(one)] for one, _ in clipped]
        rounding = _rounding([one for one, _ in clipped])
        factor = _as_clipped([given for _, given in clipped], after, rounding)
        if factor is None:
            replaced = {id(one): own for (one, _), own in zip(clipped, after, strict=True)}
        elif not all(map(torch.equal, before, after)):
            known |= {id(one): factor * own for (one, _), own in zip(clipped, before, strict=True)}

        def vector(by_id: dict[int, Tensor]) -> Tensor | None:
            if not any(id(one) in by_id for one in parameters):
                return None
            return torch.cat([by_id.get(id(one), given) for one, given in zip(parameters, received, strict=True)])

        return vector(known), vector(replaced), vector(self._after_backward)

    def _of_flat(self, units: Sequence[FlatUnit]) -> dict[int, Tensor]:
        clipped = [unit for unit in units if unit.any(any(id(one) in self._shards for one in unit.parameters))]
        whole = gathered(clipped, lambda one: self._shards.get(id(one), one.grad))
        found = ((one, whole[id(one)]) for unit in clipped for one in unit.parameters if self._sample.has(one))
        return {id(one): kept(gradient) for one, gradient in found if gradient is not None}

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        self._before_pass = PassGradients(self._optimizers.parameters())
        self._known = [dict(notes) for notes in self._notes]

    def backward_ends(self, number: int) -> Facts | None:
        """Forget the gradients that the pass changed, and keep what it left of those that this rank holds whole.

        The latter takes place only if it was asked for.
        """
        changed = [one for one in self._optimizers.parameters() if self._before_pass.is_changed(one)]
        for notes, known in zip(self._notes, self._known, strict=True):
            for name in map(id, changed):
                if name in known and notes.get(name) is known[name]:  # not noted anew during the pass
                    del notes[name]
        self._known = ()
        if self._keeps_after_backward and self.recording:
            scales = self._scales()
            with torch.no_grad(), paused():
                for one in changed:
                    if one.grad is not None and self._sample.has(one) and not is_shard(one) and part_of(one) is None:
                        self._after_backward[id(one)] = kept(one.grad) / scales[id(one)]
        return None

    @property
    def _notes(self) -> Sequence[dict[int, Tensor]]:
        return self._before, self._after, self.whole, self._shards, self._after_backward

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Forget the gradients of a step that was taken."""
        for one in parameters_of(optimizer):
            for notes in self._notes:
                notes.pop(id(one), None)
        return None


def _as_clipped(given: Sequence[Tensor], after: Sequence[Tensor], rounding: float) -> float | None:
    """Return the factor between gradients and what clipping left of them; None if there is no such factor.

    Gradients that were removed since, or are not finite, are ignored.
    """
    pairs = [(own, other) for own, other in zip(given, after, strict=True) if bool((own + other).isfinite().all())]
    size = sum(float(other @ other) for _, other in pairs)
    if not size:
        return None if any(bool(own.any()) for own, _ in pairs) else 1.0
    factor = sum(float(own @ other) for own, other in pairs) / size
    if factor <= 0 or not _are_near([own for own, _ in pairs], [factor * other for _, other in pairs], rounding):
        return None
    return 1.0 if abs(factor - 1) <= rounding else factor


def _are_near(ours: Sequence[Tensor], theirs: Sequence[Tensor], rounding: float) -> bool:
    apart = math.hypot(*(float((own - other).norm()) for own, other in zip(ours, theirs, strict=True)))
    return apart <= rounding * math.hypot(*(float(own.norm()) for own in ours))


def _rounding(parameters: Sequence[Tensor]) -> float:
    """Return by how much, relatively, rounding can move gradients away from an exact multiple of others."""
    return _ROUNDINGS * max((torch.finfo(one.dtype).eps for one in parameters), default=0.0)
