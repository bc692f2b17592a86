"""The reference trainer with one mistake in its pipeline; every rank is a separate process, so patches end."""

from __future__ import annotations

from dataclasses import replace

from plumbline.subjects import reference
from plumbline.subjects.declare import subject
from plumbline.trainer.balanced import pipeline, shared_weights, stage_training


def mistaken(name):
    """Declare a function that makes the mistake, given the job, before the reference trainer trains."""

    def declare(make):
        @subject(name=name, backends=["balanced"], capabilities=reference.CAPABILITIES)
        def train(job):
            make(job)
            reference.fit_stages(job)

        return train

    return declare


@mistaken("stage-doubled")
def stage_doubled(job):
    """Doubles the gradients of the second stage."""
    complete = stage_training.RunningStage.complete

    def doubled(self, optimizer):
        complete(self, optimizer)
        if job.rank == 1:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad.mul_(2)

    stage_training.RunningStage.complete = doubled


@mistaken("tie-lost")
def tie_lost(job):
    """Each stage keeps its own gradient of a weight that both hold."""
    shared_weights.SharedWeights.add_gradients = lambda self, own: None


@mistaken("replicas-apart")
def replicas_apart(job):
    """Each replica of a stage keeps the gradients of its own micro-batches."""
    shared_weights.StageReplicas.sum_gradients = lambda self, weights: None


@mistaken("same-share")
def same_share(job):
    """All replicas train on the first one's share of the batch."""
    train = pipeline.Pipeline.train

    def first_share(self, *arguments):
        self.place = replace(self.place, replica=0)
        return train(self, *arguments)

    pipeline.Pipeline.train = first_share
