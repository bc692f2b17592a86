"""What the recorder treats as training, and what as evaluation; and how much each model has seen at which time."""

from __future__ import annotations

import pytest
import torch

from plumbline.worker.recorder.recorder import Recorder
from plumbline.workloads import WORKLOADS


class Watched:
    """A model with a recorder that is not hooked into torch: steps are reported by hand."""

    def __init__(self, name="mlp"):
        self.workload = WORKLOADS[name]
        self.recorder = Recorder()
        self.model = self.workload.model()
        self.recorder.watch(self.model)
        self.optimizer = self.workload.optimizer(self.model.parameters())

    def forward(self, *ids, job_loss=True):
        batch = self.workload.dataset(1).batch(ids)
        outputs = self.model(batch)
        if job_loss:
            self.recorder.on_loss(batch)
        return self.workload.loss(outputs, batch)

    def evaluate(self, *ids, **options):
        self.model.eval()
        loss = self.forward(*ids, **options)
        self.model.train()
        return loss

    def step(self):
        self.recorder.optimizer_steps.before(self.optimizer, (), {})
        self.recorder.optimizer_steps.after(self.optimizer, (), {})

    @property
    def trace(self):
        return self.recorder.trace(0)


def seen(trace):
    return [(e.step, e.micro_batches, e.samples, e.training) for e in trace.evaluations]


@pytest.mark.parametrize("job_loss", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_forward_in_evaluation_mode_without_a_backward_is_an_evaluation(job_loss, enabled):
    watched = Watched()
    watched.forward(0, 1, job_loss=job_loss).backward()
    with torch.set_grad_enabled(enabled):
        watched.evaluate(5, 6, job_loss=job_loss)
        watched.evaluate(7, job_loss=job_loss)
    watched.forward(2, 3, job_loss=job_loss).backward()
    watched.step()
    with torch.set_grad_enabled(enabled):
        watched.evaluate(8, job_loss=job_loss)
    trace = watched.trace
    assert seen(trace) == [(0, 1, (5, 6, 7), False), (1, 0, (8,), False)]
    assert [micro.forwards for micro in trace.steps[0].micro_batches] == [((0, 1),), ((2, 3),)]


def test_a_backward_makes_it_training_whatever_the_mode():
    watched = Watched()
    watched.evaluate(0, 1).backward()
    watched.evaluate(2, 3, job_loss=False).backward()
    watched.step()
    trace = watched.trace
    assert not trace.evaluations
    assert [micro.samples for micro in trace.steps[0].micro_batches] == [(0, 1), (2, 3)]


def test_a_training_forward_without_a_backward_is_training_that_went_wrong():
    watched = Watched()
    watched.forward(0, 1)
    watched.step()
    assert [micro.samples for micro in watched.trace.steps[0].micro_batches] == [(0, 1)]


def test_an_evaluation_in_training_mode_says_so():
    watched = Watched()
    with torch.no_grad():
        watched.evaluate(0, 1)
        watched.forward(2)
    assert seen(watched.trace) == [(0, 0, (0, 1, 2), True)]


def test_a_step_begins_with_the_buffers_of_its_first_training_forward():
    watched = Watched("validation")
    watched.evaluate(0, 1, 2)
    watched.model.norm.running_mean.fill_(7.0)  # like ranks that share their buffers
    watched.forward(0, 1, 2).backward()
    watched.step()
    assert watched.trace.steps[0].buffers["norm.running_mean"].eq(7.0).all()


def test_a_report_knows_how_much_was_trained_on():
    watched = Watched()
    watched.recorder.on_log("loss", 1)
    watched.forward(0).backward()
    watched.evaluate(5)
    watched.recorder.on_log("loss", torch.tensor(2.0))
    watched.forward(1, job_loss=False).backward()
    watched.recorder.on_log("loss", 3.0)
    watched.step()
    watched.recorder.on_log("loss", 4.0)
    places = [(logged.step, logged.micro_batches, logged.value) for logged in watched.trace.logged]
    assert places == [(0, 0, 1.0), (0, 1, 2.0), (0, 2, 3.0), (1, 0, 4.0)]


def test_of_several_models_the_one_that_is_trained_is_recorded():
    """A trainer may ask for the models of all its processes before it starts them."""
    watched = Watched()
    watched.recorder.watch(watched.workload.model())
    watched.forward(0, 1).backward()
    watched.recorder.optimizer_steps.before(watched.optimizer, (), {})
    watched.optimizer.step()
    watched.recorder.optimizer_steps.after(watched.optimizer, (), {})
    (step,) = watched.trace.steps
    assert any(not torch.equal(step.before[name], value) for name, value in step.after.items())
