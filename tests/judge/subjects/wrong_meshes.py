"""Trainers on meshes with one mistake each; every rank is a separate process."""

from __future__ import annotations

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import CAPABILITIES, fit
from plumbline.subjects.torch_ep import Ep
from plumbline.subjects.torch_tp import Tp


@subject(name="tp-by-rank", backends=["tp", "ddp+tp"], capabilities=CAPABILITIES)
def tp_by_rank(job):
    """Shards samples by rank instead of replica, so ranks of a tensor-parallel group draw different samples."""
    trainer = Tp(job)
    job.data_rank, job.data_ranks = job.rank, job.world_size
    fit(job, trainer)


@subject(name="experts-not-divided", backends=["ep"], capabilities=CAPABILITIES)
def experts_not_divided(job):
    """Does not divide the gradients of experts, so they are sums over all ranks' losses."""

    class Mistaken(Ep):
        def before_step(self):
            super().before_step()
            for parameter in self.model.experts.parameters():
                parameter.grad *= job.world_size

    fit(job, Mistaken(job))
