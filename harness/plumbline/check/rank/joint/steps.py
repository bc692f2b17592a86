"""When a step's gradients are compared with the joint forward, and what is known of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.rank.joint.comparison import JointComparison
from plumbline.check.rank.joint.forward import RecordedCall
from plumbline.check.rank.joint.pipelines import PipelineDivisors
from plumbline.check.rank.joint.weights import JointParameter, leaves_of
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.local_gradients import ArrivedGradients
from plumbline.check.rank.unclipped import UnclippedGradients
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.observer import Facts, Observer
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of
from plumbline.replay.reasons import COMMUNICATES


class JointSteps(Observer):
    """Compares the gradients of steps whose ranks cannot compute them alone; the result is among the step's facts."""

    name = "joint"

    def __init__(self, optimizers: KnownOptimizers, names: ParameterNames, unclipped: UnclippedGradients) -> None:
        self._optimizers = optimizers
        self._names = names
        self._unclipped = unclipped
        self._divisors = PipelineDivisors()
        self._comparison = JointComparison()
        self._has_loss: dict[int, bool] = {}
        self._found: Facts | None = None

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Note whether the pass begins at a loss, or at activations of which another rank knows the gradient."""
        self._divisors.begin()
        self._has_loss[number] = all(root.numel() == 1 for root in roots)

    def compare(
        self, calls: Sequence[RecordedCall], passes: Sequence[ArrivedGradients], reasons: Sequence[str]
    ) -> None:
        """Compare the gradients of a step, if needed; ``reasons`` say why calls could not be computed again."""
        losses = [self._has_loss.pop(one.number, True) for one in passes]
        if calls and _are_several_ranks() and (not all(losses) or _needs_all_ranks(calls, reasons)):
            self._found = self._comparison.compare(calls, list(self._held(calls)), has_loss=any(losses))

    def stop(self) -> None:
        """Let go of gradients."""
        super().stop()
        self._comparison.forget()

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Return what came of the comparison before the step."""
        found, self._found = self._found, None
        return found

    def _held(self, calls: Sequence[RecordedCall]) -> Iterator[JointParameter]:
        """Yield the parameters that calls use and an optimizer updates."""
        leaves = leaves_of(self._names.roots)
        used = {id(parameter): parameter for one in calls for parameter in one.call.trainable}
        for optimizer in self._optimizers:
            for one in parameters_of(optimizer):
                if id(one) in used:
                    factor = scale_left(optimizer) * self._divisors.of(one) * self._unclipped.factor(one)
                    yield JointParameter(self._names.of_one(one), used.pop(id(one)), leaves.get(id(one)), factor)


def _are_several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _needs_all_ranks(calls: Sequence[RecordedCall], reasons: Sequence[str]) -> bool:
    """Return whether no rank can compute its gradients alone: a model is in parts, or a forward communicates."""
    if any(COMMUNICATES in why for why in reasons):
        return True
    return any(one.call.is_distributed or one.call.receives_activations for one in calls)
