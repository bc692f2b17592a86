"""Evaluations that are left out, that come at the wrong time, or that see the wrong samples."""

from __future__ import annotations

import torch
from expect import any_check, known_bad
from reporting import evaluation, fit, nothing, share

CELLS = ["validation/none/1x1/32", "validation/ddp/1x2/32", "metrics/ddp/1x3/32"]
RANKS = CELLS[1:]


def quietly(ids):
    """Return an evaluation of ``ids(job)`` that reports nothing."""
    return lambda job, model: evaluation(job, model, ids(job))


@known_bad("metrics", causes=["never-evaluated"], on=CELLS)
def never_evaluates(job):
    """``validate_every`` is overlooked."""
    fit(job, evaluate=nothing)


@known_bad("metrics", causes=["evaluated-once-an-epoch"], on=CELLS)
def evaluates_once_an_epoch(job):
    """It is only at the end of an epoch that anybody looks."""
    fit(job, due=lambda number, last: number == -(-len(job.dataset) // job.global_batch_size))


@known_bad("metrics", causes=["waits-for-the-step"], on=CELLS[:2])
def waits_for_the_step(job):
    """An evaluation that is due within a window comes after it."""
    waiting = [False]

    def due(number, last):
        waiting[0] = waiting[0] or number % job.validate_every == 0
        now = waiting[0] and last
        waiting[0] = waiting[0] and not last
        return now

    fit(job, due=due)


@known_bad("metrics", causes=["evaluated-once-an-epoch", "steps-counted"], on=CELLS)
def counts_optimizer_steps(job):
    """So many optimizer steps pass until the next evaluation, not batches."""
    steps = [0]

    def due(number, last):
        steps[0] += last
        return last and steps[0] % job.validate_every == 0

    fit(job, due=due)


@known_bad("metrics", causes=["batches-counted-over-epochs"], on=["metrics/none/1x1/32", "metrics/ddp/1x3/32"])
def counts_on_into_the_next_epoch(job):
    """Batches are counted from the start of the training."""
    batches = [0]

    def due(number, last):
        batches[0] += 1
        return batches[0] % job.validate_every == 0

    fit(job, due=due)


@known_bad("data", "metrics", causes=["tail-dropped"], on=CELLS)
def last_batch_of_the_evaluation_dropped(job):
    """``drop_last`` where it does harm."""
    fit(job, evaluate=quietly(lambda job: list(share(job))[: len(share(job)) // job.batch_size * job.batch_size]))


@known_bad("data", "metrics", causes=["tail-dropped"], on=CELLS)
def first_batch_only(job):
    """A limit from somebody's debugging is still there."""
    fit(job, evaluate=quietly(lambda job: list(share(job))[: job.batch_size // 2]))


@known_bad("data", "metrics", causes=["tail-dropped"], on=RANKS)
def what_no_share_has_room_for(job):
    """Each rank has ``len // world`` samples, the others have no place."""
    fit(job, evaluate=quietly(lambda job: list(share(job))[: len(job.val_dataset) // job.world_size]))


@known_bad("data", "metrics", causes=["only-some-ranks-evaluate"], on=RANKS)
def only_rank_zeros_share(job):
    """Rank 0 evaluates, but only its share."""
    fit(job, evaluate=quietly(lambda job: share(job) if job.rank == 0 else ()))


@known_bad("data", "metrics", causes=["ranks-evaluate-alike"], on=RANKS)
def everybody_evaluates_the_same_share(job):
    """The sampler is not told its rank."""
    fit(job, evaluate=quietly(lambda job: range(0, len(job.val_dataset), job.world_size)))


@known_bad("data", "metrics", causes=["evaluates-another-dataset"], on=CELLS)
def evaluates_what_it_trained_on(job):
    """The loader of the training samples is handed to the evaluation."""

    def report(job, model):
        evaluation(job, model, range(job.rank, len(job.dataset), job.world_size), data=job.dataset)

    fit(job, evaluate=report)


@known_bad(
    "buffers",
    "metrics",
    causes=["evaluated-in-training-mode"],
    on={**any_check(*CELLS), "validation/none/1x1/32": "buffers"},
)
def evaluates_in_training_mode(job):
    """Nobody calls ``eval()``: units are dropped, and running statistics take up what nobody trains on."""

    @torch.no_grad()
    def report(job, model):
        batch = job.val_dataset.batch(share(job))
        job.loss(model(batch), batch)

    fit(job, evaluate=report)
