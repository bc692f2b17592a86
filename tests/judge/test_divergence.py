"""A training that one device cannot do in this precision either is no mistake; what is wrong before it still is."""

from __future__ import annotations

import torch

from harness.core.outcome import Outcome
from harness.evidence.trace import MicroBatch, RankTrace, Step, Trace
from harness.judge.oracle.oracle import Oracle
from harness.workloads.generated import Generated, Recipe


class Diverging(Generated):
    """Four layers and a rate that is far too large: the squared error overflows float32 after a few steps."""

    name = "diverging"
    recipe = Recipe(layers=("linear-8",) * 4, loss="squares", steps_per_epoch=8)

    def optimizers(self, params):
        return [torch.optim.SGD(params, lr=1e3)]


def judged(simulation, cell_of, factor=1.0):
    """The findings about a training on one device whose first gradient is multiplied by ``factor``."""
    workload, cell = Diverging(), cell_of("diverging", "none", "1x1", "32")
    trainer, steps = Oracle(workload, 1, cell.arithmetic), []
    optimizer = trainer.optimizer()
    for first in range(0, len(trainer.data), 4):
        own = tuple(range(first, first + 4))
        before = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        gradient = {name: factor * value for name, value in trainer.gradient((((own,),),)).items()}
        gradient = {name: value.float() for name, value in gradient.items()}
        trainer.set_gradients(gradient)
        optimizer.step()
        after = {name: parameter.detach().clone() for name, parameter in trainer.parameters.items()}
        steps.append(Step((MicroBatch((own,), own),), before, gradient, after, (1e3,)))
        factor = 1.0
    trace = Trace((RankTrace(0, 1, tuple(steps)),))
    assert not all(bool(value.isfinite().all()) for value in steps[-1].after.values())
    return simulation.judge(trace, workload, cell)


def test_a_training_that_diverges_on_one_device_is_not_accused(simulation, cell_of):
    findings = judged(simulation, cell_of)
    assert not [one for one in findings.values() if one.outcome is Outcome.FAILED]
    assert findings["gradients"].outcome is Outcome.ERRORED
    assert "diverges: at step" in findings["gradients"].message


def test_what_is_wrong_before_it_diverges_is_named(simulation, cell_of):
    found = judged(simulation, cell_of, factor=2.0)["gradients"]
    assert found.outcome is Outcome.FAILED
    assert found.step == 0
