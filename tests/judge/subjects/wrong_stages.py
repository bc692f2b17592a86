"""The reference trainer with one mistake in its pipeline each; every rank is a process of its own, so patches end."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.modules.batchnorm import _BatchNorm

from harness.subjects import reference
from harness.subjects.declare import subject
from harness.trainer.balanced import pipeline, shared_weights, stage_replicas, stage_training


def mistaken(name):
    """Declare a function that makes the mistake, given the job, before the reference trainer trains it."""

    def declare(make):
        @subject(name=name, backends=["balanced"], capabilities=reference.CAPABILITIES)
        def train(job):
            make(job)
            reference.fit_stages(job)

        return train

    return declare


@mistaken("stage-doubled")
def stage_doubled(job):
    """The gradients of the second stage are twice as large."""
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
    """Each stage keeps its own gradient of a weight that both of them hold."""
    shared_weights.SharedWeights.add_gradients = lambda self, own: None


@mistaken("replicas-apart")
def replicas_apart(job):
    """Each replica of a stage keeps the gradients of its own micro-batches."""
    stage_replicas.StageReplicas.sum_gradients = lambda self, weights: None


@mistaken("same-share")
def same_share(job):
    """All replicas train on the first one's share of the batch."""
    train = pipeline.Pipeline.train

    def first_share(self, *arguments):
        self.place = replace(self.place, replica=0)
        return train(self, *arguments)

    pipeline.Pipeline.train = first_share


@mistaken("tie-on-one-stage")
def tie_on_one_stage(job):
    """The first stage alone gets the sum."""
    add = shared_weights.SharedWeights.add_gradients

    def forgotten(self, own):
        before = [(weight, None if weight.grad is None else weight.grad.clone()) for weight in own]
        add(self, own)
        if job.rank == 1:
            for weight, gradient in before:
                weight.grad = gradient

    shared_weights.SharedWeights.add_gradients = forgotten


@mistaken("sum-of-micro-batches")
def sum_of_micro_batches(job):
    """Losses of micro-batches are added."""
    backward = pipeline.Pipeline._backward

    def undivided(self, passed, loss, *others):
        backward(self, passed, None if loss is None else loss * self.micro_batches, *others)

    pipeline.Pipeline._backward = undivided


@mistaken("other-micro-batch")
def other_micro_batch(job):
    """The last stage has the activations of one micro-batch and the labels of another."""
    split = pipeline.split
    if job.rank == 1:
        pipeline.split = lambda batch, count: list(reversed(split(batch, count)))


@mistaken("forward-twice")
def forward_twice(job):
    """The first stage runs each forward twice, and sends the second one's activations."""
    run = pipeline.Interception.run

    def again(self, part, inputs, step):
        if job.rank == 0 and part.first == 0 and part.last < 2 * len(self.calls):
            run(self, part, inputs, step)
        return run(self, part, inputs, step)

    stage_training.train = _around(stage_training.train, lambda: setattr(pipeline.Interception, "run", again))


def _around(train, begin):
    def begun(*args):
        begin()
        return train(*args)

    return begun


@mistaken("statistics-twice")
def statistics_twice(job):
    """BatchNorm runs once more for each micro-batch."""
    forward = _BatchNorm.forward

    def twice(self, inputs):
        forward(self, inputs)
        return forward(self, inputs)

    _BatchNorm.forward = twice


@mistaken("stage-stands-still")
def stage_stands_still(job):
    """The second stage never steps with what it has: its weights stay as they were."""
    complete = stage_training.RunningStage.complete

    def zeroed(self, optimizer):
        complete(self, optimizer)
        if job.rank == 1:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad.zero_()

    stage_training.RunningStage.complete = zeroed
