"""A pipelined model with a fault in one stage: in its backward or in its optimizer."""

from __future__ import annotations

from dying import killed
from hanging import for_ever
from right import STEP, declare
from torch.optim.optimizer import register_optimizer_step_pre_hook

from plumbline import subject
from plumbline.subjects import reference


def in_optimizer(name, fault):
    """Return a subject whose last stage calls ``fault(job)`` after ``STEP`` steps, in its optimizer."""

    def train(job):
        steps = iter(range(1 << 20))

        def count(*_):
            if next(steps) == STEP and job.rank == job.world_size - 1:
                fault(job)

        register_optimizer_step_pre_hook(count)
        reference.fit_stages(job)

    train.__module__ = __name__
    return subject(name=name, backends=["balanced"], capabilities=reference.CAPABILITIES)(train)


def break_down(gradient):
    """Raise an error."""
    raise RuntimeError("a gradient is broken")


@subject(name="a-stage-raises", backends=["balanced"])
def raises_in_backward(job):
    """The last stage raises in the backward of the third batch."""
    loss, batches = job.loss, iter(range(1 << 20))

    def broken(outputs, batch):
        # The first rank trains on some micro-batches to make the plan.
        if job.rank == job.world_size - 1 and next(batches) == STEP * job.micro_batches:
            outputs.register_hook(break_down)
        return loss(outputs, batch)

    job.loss = broken
    reference.fit_stages(job)


trains = declare("trains", module=__name__)
stage_killed = in_optimizer("a-stage-is-killed", killed)
stage_hangs = in_optimizer("a-stage-hangs", for_ever)
