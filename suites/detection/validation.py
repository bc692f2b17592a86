"""Evaluations that are missing, come at the wrong time, or see the wrong samples."""

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
    """Ignores ``validate_every``."""
    fit(job, evaluate=nothing)


@known_bad("metrics", causes=["evaluated-once-an-epoch"], on=CELLS)
def evaluates_once_an_epoch(job):
    """Evaluates only at the end of each epoch."""
    fit(job, due=lambda number, last: number == -(-len(job.dataset) // job.global_batch_size))


@known_bad("metrics", causes=["waits-for-the-step"], on=CELLS[:2])
def waits_for_the_step(job):
    """Delays an evaluation that is due within a window to the end of the window."""
    waiting = [False]

    def due(number, last):
        waiting[0] = waiting[0] or number % job.validate_every == 0
        now = waiting[0] and last
        waiting[0] = waiting[0] and not last
        return now

    fit(job, due=due)


@known_bad("metrics", causes=["evaluated-once-an-epoch", "steps-counted"], on=CELLS)
def counts_optimizer_steps(job):
    """Counts optimizer steps instead of batches until the next evaluation."""
    steps = [0]

    def due(number, last):
        steps[0] += last
        return last and steps[0] % job.validate_every == 0

    fit(job, due=due)


@known_bad("metrics", causes=["batches-counted-over-epochs"], on=["metrics/none/1x1/32", "metrics/ddp/1x3/32"])
def counts_on_into_the_next_epoch(job):
    """Counts batches from the start of training, not of the epoch."""
    batches = [0]

    def due(number, last):
        batches[0] += 1
        return batches[0] % job.validate_every == 0

    fit(job, due=due)


@known_bad("data", "metrics", causes=["tail-dropped"], on=CELLS)
def last_batch_of_the_evaluation_dropped(job):
    """Drops the short last batch of the evaluation."""
    fit(job, evaluate=quietly(lambda job: list(share(job))[: len(share(job)) // job.batch_size * job.batch_size]))


@known_bad("data", "metrics", causes=["tail-dropped"], on=CELLS)
def first_batch_only(job):
    """Evaluates only half a batch, a limit left over from debugging."""
    fit(job, evaluate=quietly(lambda job: list(share(job))[: job.batch_size // 2]))


@known_bad("data", "metrics", causes=["tail-dropped"], on=RANKS)
def what_no_share_has_room_for(job):
    """Evaluates ``len // world_size`` samples per rank, and drops the rest."""
    fit(job, evaluate=quietly(lambda job: list(share(job))[: len(job.val_dataset) // job.world_size]))


@known_bad("data", "metrics", causes=["only-some-ranks-evaluate"], on=RANKS)
def only_rank_zeros_share(job):
    """Only rank 0 evaluates, and only its own share."""
    fit(job, evaluate=quietly(lambda job: share(job) if job.rank == 0 else ()))


@known_bad("data", "metrics", causes=["ranks-evaluate-alike"], on=RANKS)
def everybody_evaluates_the_same_share(job):
    """Every rank evaluates rank 0's share."""
    fit(job, evaluate=quietly(lambda job: range(0, len(job.val_dataset), job.world_size)))


@known_bad("data", "metrics", causes=["evaluates-another-dataset"], on=CELLS)
def evaluates_what_it_trained_on(job):
    """Evaluates the training samples."""

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
    """Never calls ``eval()``: units are dropped, and running statistics include held-out samples."""

    @torch.no_grad()
    def report(job, model):
        batch = job.val_dataset.batch(share(job))
        job.loss(model(batch), batch)

    fit(job, evaluate=report)
