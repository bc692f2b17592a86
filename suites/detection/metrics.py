"""Figures that are reported and are not true."""

from __future__ import annotations

import torch
from base_trainer import BaseTrainer
from expect import known_bad
from reporting import evaluate, evaluation, fit, nothing, share, shared, weighted

CELLS = ["metrics/none/1x1/32", "metrics/ddp/1x2/32", "metrics/ddp/1x3/16"]
RANKS = ["metrics/ddp/1x2/32", "metrics/ddp/1x3/16", "mlp/ddp/1x2/32", "uneven/ddp/1x3/64"]


def plain(values):
    """Return the mean of numbers that all weigh the same."""
    return sum(values) / len(values)


@known_bad("metrics", causes=["mean-of-batch-means"], on=[*CELLS, "uneven/ddp/1x2/32"])
def mean_of_unequal_batch_means(job):
    """Each batch weighs the same, whatever its size."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", shared(job, sum(losses), len(losses))))


@known_bad("metrics", causes=["one-ranks-own-value"], on=RANKS)
def rank_zero_speaks_for_all(job):
    """Rank 0's figure is reported as everybody's."""

    def report(losses, sizes):
        if job.rank == 0:
            job.log("loss", sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes))

    fit(job, after_epoch=report)


@known_bad("metrics", causes=["one-ranks-own-value"], on=RANKS)
def everybody_reports_its_own(job):
    """Nothing is reduced over the ranks."""
    fit(job, after_step=lambda model, losses, sizes: job.log("loss", plain(losses)))


@known_bad("metrics", causes=["last-batch-only"], on=CELLS)
def last_batch_of_the_epoch(job):
    """The variable that the loop has left over is what is reported."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", weighted(job, losses[-1:], sizes[-1:])))


@known_bad("metrics", causes=["times-world-size"], on=RANKS)
def added_up_over_the_ranks(job):
    """The all-reduce adds, and nobody divides."""
    fit(job, after_step=lambda model, losses, sizes: job.log("loss", weighted(job, losses, sizes) * job.world_size))


@known_bad("metrics", causes=["times-window"], on=CELLS)
def divided_for_the_backward(job):
    """It is the loss that was divided by the length of the window that is reported."""

    def report(model, losses, sizes):
        job.log("loss", weighted(job, losses, sizes) / len(losses))

    fit(job, after_step=report)


@known_bad("metrics", causes=["summed"], on=CELLS)
def sum_of_batch_means(job):
    """Running total of the epoch, never divided."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", shared(job, sum(losses), 1)))


@known_bad("metrics", causes=["never-reset"], on=CELLS)
def never_begun_anew(job):
    """The running mean goes on from epoch to epoch."""
    every = ([], [])

    def report(losses, sizes):
        every[0].extend(losses)
        every[1].extend(sizes)
        job.log("loss", weighted(job, *every))

    fit(job, after_epoch=report)


@known_bad("metrics", causes=["batch-missing"], on=[*CELLS, "mlp/ddp/1x2/32"])
def first_batch_missing(job):
    """The batch during which the meter was made is not in it."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", weighted(job, losses[1:], sizes[1:])))


@known_bad("metrics", causes=["stale"], on=CELLS)
def one_step_late(job):
    """Each step reports what the step before it gave."""
    late = []

    def report(model, losses, sizes):
        late.append(weighted(job, losses, sizes))
        job.log("loss", late[-2:][0])

    fit(job, after_step=report)


@known_bad("metrics", causes=["times-loss-scale"], on=["metrics/none/1x1/16", "metrics/ddp/1x2/16", "mlp/ddp/1x2/16"])
def loss_scale_left_in(job):
    """It is the loss that went into the backward that is reported."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", weighted(job, losses, sizes) * 65536))


@known_bad("metrics", causes=["divided-by-full-batches"], on=CELLS)
def divided_by_full_batches(job):
    """The sum over samples is divided by the number of batches times the batch size, although the last is short."""

    def report(losses, sizes):
        count = len(losses) * job.batch_size
        job.log("loss", shared(job, sum(loss * size for loss, size in zip(losses, sizes, strict=True)), count))

    fit(job, after_epoch=report)


@known_bad("metrics", causes=["rounded"], on=CELLS)
def two_decimals(job):
    """The figure is rounded for people before it is reported."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", round(weighted(job, losses, sizes), 2)))


@known_bad("metrics", causes=["mean-of-rank-means"], on=RANKS[:2])
def ranks_weigh_the_same(job):
    """Ranks evaluate unequal shares, and their means are averaged."""

    def report(job, model):
        losses, sizes = evaluation(job, model, share(job))
        own = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        job.log("val_loss", shared(job, own, 1))

    fit(job, evaluate=report)


@known_bad("metrics", causes=["repeats-counted"], on=["metrics/ddp/1x2/32", "metrics/ddp/1x3/32"])
def padding_counts(job):
    """DistributedSampler pads the held-out samples with repeats, and they count."""

    def report(job, model):
        sampler = torch.utils.data.DistributedSampler(job.val_dataset, shuffle=False)
        job.log("val_loss", weighted(job, *evaluation(job, model, sampler)))

    fit(job, evaluate=report)


@known_bad("metrics", causes=["mean-of-batch-means"], on=CELLS)
def batches_of_the_evaluation_weigh_the_same(job):
    """The short last batch of an evaluation weighs as much as the others."""

    def report(job, model):
        losses, _ = evaluation(job, model, share(job))
        job.log("val_loss", shared(job, sum(losses), len(losses)))

    fit(job, evaluate=report)


@known_bad("metrics", causes=["one-ranks-own-value"], on=RANKS[:2])
def own_share_of_the_evaluation(job):
    """Each rank reports the mean of its own share."""

    def report(job, model):
        losses, sizes = evaluation(job, model, share(job))
        job.log("val_loss", sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes))

    fit(job, evaluate=report)


@known_bad("metrics", causes=["taken-before-the-step"], on=CELLS)
def evaluated_before_the_step(job):
    """The evaluation comes before the step, its figure is reported after it."""
    value = []

    def before(model):
        value[:] = [weighted(job, *evaluation(job, model, share(job)))]

    fit(job, before_step=before, evaluate=lambda job, model: job.log("val_loss", value[0]))


@known_bad("metrics", causes=["stale", "taken-before-the-step"], on=CELLS)
def value_of_the_evaluation_before(job):
    """The figure is reported before it is renewed."""
    values = []

    def report(job, model):
        values.append(weighted(job, *evaluation(job, model, share(job))))
        job.log("val_loss", values[-2:][0])

    fit(job, evaluate=report)


@known_bad("metrics", causes=["of-other-samples"], on=CELLS)
def training_loss_as_validation_loss(job):
    """Two variables with the same name: the last step's loss is reported as that of the held-out samples."""
    value = []

    def remember(model, losses, sizes):
        value[:] = [weighted(job, losses, sizes)]

    def report(job, model):
        evaluation(job, model, share(job))
        job.log("val_loss", value[0])

    fit(job, after_step=remember, evaluate=report)


@known_bad("metrics", causes=["taken-after-the-step"], on=["mlp/none/1x1/32", "mlp/ddp/1x2/32", "uneven/none/1x1/32"])
def taken_once_more_after_the_step(job):
    """The loss of the last batch is computed anew, to be reported, with the weights after the step."""

    def report(model, losses, sizes):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(job.seed + epochs[0])).tolist()
        start = steps[0] * job.global_batch_size
        own = order[start : start + job.global_batch_size][job.rank :: job.world_size]
        job.log("loss", weighted(job, *evaluation(job, model, own, data=job.dataset)))
        steps[0] += 1

    def begin(losses, sizes):
        steps[0], epochs[0] = 0, epochs[0] + 1

    steps, epochs = [0], [0]
    fit(job, after_step=report, after_epoch=begin)


@known_bad("metrics", "buffers", causes=["evaluated-in-training-mode"], on=CELLS)
def forgets_evaluation_mode(job):
    """Units are dropped where the model is to be judged."""

    def report(job, model):
        model.eval = nothing
        evaluate(job, model)

    fit(job, evaluate=report)


@known_bad("metrics", causes=["times-world-size"], on={"metrics/ddp/1x3/32": "metrics"})
class EvaluationTimesWorld(BaseTrainer):
    """The mean over the held-out samples, times the number of ranks."""

    def report(self, val_loss):
        super().report(val_loss * self.job.world_size)
