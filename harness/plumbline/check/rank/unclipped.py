"""Gradients as they were before a function clipped them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.fsdp1_gradients import gathered
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.optimizer_gradients import kept
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.recording.flat_sharding import FlatUnit, part_of
from plumbline.recording.observer import Observer
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of
from plumbline.recording.pause import paused


class UnclippedGradients(Observer):
    """Keeps the first segment of each gradient that is clipped after a backward pass, until the next pass or step.

    ``whole`` has gradients of parameters that no module holds, which may be copies of a model's in pieces.
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
        self._kept: dict[int, Tensor] = {}
        self.whole: dict[int, Tensor] = {}
        self._shards: dict[int, Tensor] = {}

    def note(self, parameters: Sequence[Tensor]) -> None:
        """Take down gradients before they are clipped."""
        if not self.recording:
            return
        scales = {
            id(one): self._loss_scale.pending_scale(opt) for opt in self._optimizers for one in parameters_of(opt)
        }
        other = {id(one) for opt in self._optimizers for one in parameters_of(opt) if not self._names.knows(one)}
        with torch.no_grad(), paused():
            for one in parameters:
                if one.grad is None or id(one) in self._kept or id(one) in self._shards:
                    continue
                if part_of(one) is not None:  # ranks may not all be here, and nothing can be gathered
                    self._shards[id(one)] = one.grad / scales.get(id(one), 1.0)
                elif self._sample.has(one):
                    self._kept[id(one)] = kept(one.grad) / scales.get(id(one), 1.0)
                    if id(one) in other:
                        self.whole[id(one)] = one.grad.detach() / scales[id(one)]

    def factor(self, parameter: Tensor) -> float:
        """Return by how much the gradient of a parameter was shortened: 1 where it was not clipped."""
        before = self._kept.get(id(parameter))
        if before is None or parameter.grad is None or not bool(before.any()):
            return 1.0
        return float(kept(parameter.grad).norm() / before.norm())

    def vector(
        self, parameters: Sequence[Tensor], received: Sequence[Tensor], units: Sequence[FlatUnit]
    ) -> Tensor | None:
        """Return the vector of gradients before they were clipped, None where none of them was.

        Those in flat ``units`` are gathered: all ranks have to ask.
        """
        known = self._kept | self._of_flat(units)
        if not any(id(parameter) in known for parameter in parameters):
            return None
        return torch.cat([known.get(id(one), given) for one, given in zip(parameters, received, strict=True)])

    def _of_flat(self, units: Sequence[FlatUnit]) -> dict[int, Tensor]:
        clipped = [unit for unit in units if unit.any(any(id(one) in self._shards for one in unit.parameters))]
        whole = gathered(clipped, lambda one: self._shards.get(id(one), one.grad))
        found = ((one, whole[id(one)]) for unit in clipped for one in unit.parameters if self._sample.has(one))
        return {id(one): kept(gradient) for one, gradient in found if gradient is not None}

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Forget what the pass changes."""
        self._kept.clear()
        self.whole.clear()
        self._shards.clear()

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Forget the gradients of a step that was taken."""
        for one in parameters_of(optimizer):
            self._kept.pop(id(one), None)
            self.whole.pop(id(one), None)
            self._shards.pop(id(one), None)
        return None
