"""Wrong metrics: trainers that report values that are not true."""

from __future__ import annotations

import torch
from base_trainer import BaseTrainer
from expect import known_bad
from reporting import evaluate, evaluation, fit, nothing, share, shared, weighted

CELLS = ["metrics/none/1x1/32", "metrics/ddp/1x2/32", "metrics/ddp/1x3/16"]
RANKS = ["metrics/ddp/1x2/32", "metrics/ddp/1x3/16", "mlp/ddp/1x2/32", "uneven/ddp/1x3/64"]


def plain(values):
    """Return the unweighted mean."""
    return sum(values) / len(values)


@known_bad("metrics", causes=["mean-of-batch-means"], on=[*CELLS, "uneven/ddp/1x2/32"])
def mean_of_unequal_batch_means(job):
    """Weights all batches equally, whatever their size."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", shared(job, sum(losses), len(losses))))


@known_bad("metrics", causes=["one-ranks-own-value"], on=RANKS)
def rank_zero_speaks_for_all(job):
    """Reports rank 0's value as that of all ranks."""

    def report(losses, sizes):
        if job.rank == 0:
            job.log("loss", sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes))

    fit(job, after_epoch=report)


@known_bad("metrics", causes=["one-ranks-own-value"], on=RANKS)
def everybody_reports_its_own(job):
    """Does not reduce the loss over the ranks."""
    fit(job, after_step=lambda model, losses, sizes: job.log("loss", plain(losses)))


@known_bad("metrics", causes=["last-batch-only"], on=CELLS)
def last_batch_of_the_epoch(job):
    """Reports the last batch's loss as that of the epoch."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", weighted(job, losses[-1:], sizes[-1:])))


@known_bad("metrics", causes=["times-world-size"], on=RANKS)
def added_up_over_the_ranks(job):
    """Sums over the ranks without dividing."""
    fit(job, after_step=lambda model, losses, sizes: job.log("loss", weighted(job, losses, sizes) * job.world_size))


@known_bad("metrics", causes=["times-window"], on=CELLS)
def divided_for_the_backward(job):
    """Reports the loss after it was divided by the window length."""

    def report(model, losses, sizes):
        job.log("loss", weighted(job, losses, sizes) / len(losses))

    fit(job, after_step=report)


@known_bad("metrics", causes=["summed"], on=CELLS)
def sum_of_batch_means(job):
    """Reports the sum of the epoch's batch losses without dividing by their number."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", shared(job, sum(losses), 1)))


@known_bad("metrics", causes=["never-reset"], on=CELLS)
def never_begun_anew(job):
    """Never resets the running mean between epochs."""
    every = ([], [])

    def report(losses, sizes):
        every[0].extend(losses)
        every[1].extend(sizes)
        job.log("loss", weighted(job, *every))

    fit(job, after_epoch=report)


@known_bad("metrics", causes=["batch-missing"], on=[*CELLS, "mlp/ddp/1x2/32"])
def first_batch_missing(job):
    """Leaves the first batch out of the mean."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", weighted(job, losses[1:], sizes[1:])))


@known_bad("metrics", causes=["stale"], on=CELLS)
def one_step_late(job):
    """Reports the loss of the previous step."""
    late = []

    def report(model, losses, sizes):
        late.append(weighted(job, losses, sizes))
        job.log("loss", late[-2:][0])

    fit(job, after_step=report)


@known_bad("metrics", causes=["times-loss-scale"], on=["metrics/none/1x1/16", "metrics/ddp/1x2/16", "mlp/ddp/1x2/16"])
def loss_scale_left_in(job):
    """Reports the scaled loss."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", weighted(job, losses, sizes) * 65536))


@known_bad("metrics", causes=["divided-by-full-batches"], on=CELLS)
def divided_by_full_batches(job):
    """Divides the sum over samples by batches times batch size, although the last batch is short."""

    def report(losses, sizes):
        count = len(losses) * job.batch_size
        job.log("loss", shared(job, sum(loss * size for loss, size in zip(losses, sizes, strict=True)), count))

    fit(job, after_epoch=report)


@known_bad("metrics", causes=["rounded"], on=CELLS)
def two_decimals(job):
    """Rounds the value to two decimals before reporting it."""
    fit(job, after_epoch=lambda losses, sizes: job.log("loss", round(weighted(job, losses, sizes), 2)))


@known_bad("metrics", causes=["mean-of-rank-means"], on=RANKS[:2])
def ranks_weigh_the_same(job):
    """Averages the ranks' means, although they evaluate unequal shares."""

    def report(job, model):
        losses, sizes = evaluation(job, model, share(job))
        own = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        job.log("val_loss", shared(job, own, 1))

    fit(job, evaluate=report)


@known_bad("metrics", causes=["repeats-counted"], on=["metrics/ddp/1x2/32", "metrics/ddp/1x3/32"])
def padding_counts(job):
    """Counts the held-out samples with which DistributedSampler pads the shares."""

    def report(job, model):
        sampler = torch.utils.data.DistributedSampler(job.val_dataset, shuffle=False)
        job.log("val_loss", weighted(job, *evaluation(job, model, sampler)))

    fit(job, evaluate=report)


@known_bad("metrics", causes=["mean-of-batch-means"], on=CELLS)
def batches_of_the_evaluation_weigh_the_same(job):
    """Weights the short last batch of an evaluation like the others."""

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
    """Evaluates before the step, but reports the result after it."""
    value = []

    def before(model):
        value[:] = [weighted(job, *evaluation(job, model, share(job)))]

    fit(job, before_step=before, evaluate=lambda job, model: job.log("val_loss", value[0]))


@known_bad("metrics", causes=["stale", "taken-before-the-step"], on=CELLS)
def value_of_the_evaluation_before(job):
    """Reports the result of the previous evaluation."""
    values = []

    def report(job, model):
        values.append(weighted(job, *evaluation(job, model, share(job))))
        job.log("val_loss", values[-2:][0])

    fit(job, evaluate=report)


@known_bad("metrics", causes=["of-other-samples"], on=CELLS)
def training_loss_as_validation_loss(job):
    """Reports the last step's training loss as the validation loss."""
    value = []

    def remember(model, losses, sizes):
        value[:] = [weighted(job, losses, sizes)]

    def report(job, model):
        evaluation(job, model, share(job))
        job.log("val_loss", value[0])

    fit(job, after_step=remember, evaluate=report)


@known_bad("metrics", causes=["taken-after-the-step"], on=["mlp/none/1x1/32", "mlp/ddp/1x2/32", "uneven/none/1x1/32"])
def taken_once_more_after_the_step(job):
    """Recomputes the last batch's loss after the step, and reports that."""

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
    """Evaluates in training mode, so dropout is active."""

    def report(job, model):
        model.eval = nothing
        evaluate(job, model)

    fit(job, evaluate=report)


@known_bad("metrics", causes=["times-world-size"], on={"metrics/ddp/1x3/32": "metrics"})
class EvaluationTimesWorld(BaseTrainer):
    """Multiplies the validation loss by the number of ranks."""

    def report(self, val_loss):
        super().report(val_loss * self.job.world_size)
