"""Divergence that one device shows too is no mistake; mistakes before it are still found."""

from __future__ import annotations

import torch

from plumbline.core.finding import VACUOUS
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import MicroBatch, RankTrace, Step, Trace
from plumbline.judge.oracle.oracle import Oracle, mean_gradient
from plumbline.workloads.generated import Generated, Recipe


class Diverging(Generated):
    """Four layers and a learning rate that is far too large: the squared error overflows float32 after a few steps."""

    name = "diverging"
    recipe = Recipe(layers=("linear-8",) * 4, loss="squares", steps_per_epoch=8)

    def optimizers(self, params):
        return [torch.optim.SGD(params, lr=1e3)]


class Clipped(Generated):
    """Products of outputs grow until the squared norm for clipping overflows float32."""

    name = "clipped"
    recipe = Recipe(
        layers=("attention", "linear-5", "attention"), loss="two", clip_norm=100.0, batch_size=6, steps_per_epoch=6,
        seed=52,
    )  # fmt: skip


def trained(workload, cell, factor=1.0):
    """Return the steps of a training on one device whose first gradient is multiplied by ``factor``."""
    trainer, steps = Oracle(workload, 1, cell.arithmetic), []
    optimizer, rate, size = trainer.optimizer(), trainer.optimizer().param_groups[0]["lr"], workload.batch_size
    for first in range(0, len(trainer.data), size):
        own = tuple(range(first, first + size))
        before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        gradient = mean_gradient(trainer.group_gradients((((own,),),)))
        trainer.set_gradients({name: value.float() for name, value in gradient.items()})
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trainer.parameters.values(), workload.clip_norm)
        gradient = {name: factor * parameter.grad for name, parameter in trainer.parameters.items()}
        trainer.set_gradients(gradient)
        optimizer.step()
        after = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        steps.append(Step((MicroBatch((own,), own),), before, gradient, after, (rate,)))
        factor = 1.0
    return tuple(steps)


def judged(simulation, cell_of, workload, factor=1.0, error=""):
    """Return the findings on such a training, which ends with an ``error``."""
    cell = cell_of(workload.name, "none", "1x1", "32")
    rank = RankTrace(0, 1, trained(workload, cell, factor), error=error, failed_at=1.0 if error else None)
    return simulation.judge(Trace((rank,)), workload, cell)


def test_zeros_that_clipping_by_an_infinite_norm_leaves_are_no_accusation(simulation, cell_of):
    steps = trained(Clipped(), cell_of("clipped", "none", "1x1", "32"))
    cleared = next(number for number, step in enumerate(steps) if not any(g.any() for g in step.gradients.values()))
    findings = judged(simulation, cell_of, Clipped())
    assert not [one for one in findings.values() if one.outcome is Outcome.FAILED]
    assert f"the gradient at step {cleared}," in findings["gradients"].message


def test_what_is_wrong_before_a_norm_is_infinite_is_named(simulation, cell_of):
    assert judged(simulation, cell_of, Clipped(), factor=2.0)["gradients"].step == 0


def test_a_training_that_diverges_on_one_device_is_not_accused(simulation, cell_of):
    last = trained(Diverging(), cell_of("diverging", "none", "1x1", "32"))[-1]
    assert not all(bool(value.isfinite().all()) for value in last.after.values())
    findings = judged(simulation, cell_of, Diverging())
    assert not [one for one in findings.values() if one.outcome is Outcome.FAILED]
    assert findings["gradients"].outcome is Outcome.ERRORED
    assert "the training diverges" in findings["gradients"].message


def test_what_is_wrong_before_it_diverges_is_named(simulation, cell_of):
    found = judged(simulation, cell_of, Diverging(), factor=2.0)["gradients"]
    assert found.outcome is Outcome.FAILED
    assert found.step == 0


STOPPED = "RuntimeError: Loss is not finite"


def test_a_trainer_that_stops_where_its_training_diverges_is_not_accused(simulation, cell_of):
    findings = judged(simulation, cell_of, Diverging(), error=STOPPED)
    assert not [one for one in findings.values() if one.outcome is Outcome.FAILED]
    assert findings["launch"].message.startswith(VACUOUS)
    assert "the training diverges" in findings["launch"].message
    assert STOPPED in findings["launch"].message


def test_what_is_wrong_before_a_trainer_stops_is_named(simulation, cell_of):
    assert judged(simulation, cell_of, Diverging(), factor=2.0, error=STOPPED)["gradients"].step == 0


def test_a_trainer_that_raises_in_a_training_that_does_not_diverge_is_accused(simulation, cell_of):
    class Plain(Generated):
        name = "plain"
        recipe = Recipe(steps_per_epoch=2)

    found = judged(simulation, cell_of, Plain(), error=STOPPED)["launch"]
    assert found.cause == "raised"
    assert not found.message.startswith(VACUOUS)
