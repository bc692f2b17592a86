"""Losses divided by the wrong count: of samples, tokens, padding, micro-batches or ranks."""

from __future__ import annotations

import torch
from base_trainer import BaseTrainer
from expect import any_check, failing, known_bad
from loop import average, ddp, loader, replicas, windows, wrapped

DEVICES = ["uneven/dp/1x2/32", "uneven/dp/1x3/64", "lm-tokens/dp/1x3/32", "lm-tokens/ddp2/2x2/32"]
TOKENS = ["lm-tokens/none/1x1/32", "lm-tokens/ddp/1x2/32", "lm-tokens/ddp/1x3/64"]


def fit(job, loss):
    """Train correctly on ``loss(outputs, batch)``."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


def token_losses(outputs, batch):
    """Return each token's loss, padding included."""
    targets = batch["tokens"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets, reduction="none").view(len(outputs), -1)


@known_bad(
    "loss-normalisation",
    causes=["shares-weighted-wrongly"],
    on={**any_check(*TOKENS), **failing("gradients", "lm-tokens/ddp/1x2")},
)
def divided_by_the_padded_length(job):
    """Divides the sum over real tokens by the number of all positions."""
    fit(job, lambda outputs, batch: (token_losses(outputs, batch) * batch["real"]).sum() / batch["real"].numel())


@known_bad("loss-normalisation", causes=["padding-counted-in"], on=TOKENS)
def padding_counted_in(job):
    """Averages over all positions, including padding."""
    fit(job, lambda outputs, batch: token_losses(outputs, batch).mean())


@known_bad("loss-normalisation", causes=["mean-over-samples"], on=TOKENS)
def mean_of_each_samples_mean(job):
    """Averages each sample's tokens, and then the samples, so tokens of short samples weigh too much."""

    def loss(outputs, batch):
        losses = token_losses(outputs, batch) * batch["real"]
        return (losses.sum(1) / batch["real"].sum(1)).mean()

    fit(job, loss)


@known_bad("loss-normalisation", causes=["shares-weighted-wrongly"], on=TOKENS)
def divided_by_the_number_of_samples(job):
    """Divides the sum over tokens by the number of sequences."""
    fit(job, lambda outputs, batch: (token_losses(outputs, batch) * batch["real"]).sum() / len(outputs))


@known_bad("loss-normalisation", causes=["shares-weighted-wrongly"], on=TOKENS)
def summed_not_divided(job):
    """Sums over tokens without dividing."""
    fit(job, lambda outputs, batch: (token_losses(outputs, batch) * batch["real"]).sum())


@known_bad(
    "loss-normalisation",
    causes=["number-of-samples-left-in"],
    on=["mlp/none/1x1/32", "mlp/ddp/1x2/32", "mlp/ddp/1x3/64"],
)
def summed_over_the_samples(job):
    """Sums over the batch instead of averaging."""
    fit(job, lambda outputs, batch: job.loss(outputs, batch) * len(outputs))


@known_bad(
    "loss-normalisation",
    causes=["number-of-samples-left-in"],
    on=["mlp/none/1x1/32", "mlp/ddp/1x2/32", "mlp/ddp/1x3/64"],
)
def divided_by_the_batch_size_again(job):
    """Divides the mean by the batch size again."""
    fit(job, lambda outputs, batch: job.loss(outputs, batch) / len(outputs))


@known_bad("loss-normalisation", "averaging", causes=["averaged-twice"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def divided_by_the_global_batch(job):
    """Divides the rank's summed loss by the global batch size, although DDP averages over the ranks."""
    fit(job, lambda outputs, batch: job.loss(outputs, batch) * len(outputs) / job.global_batch_size)


@known_bad(
    "loss-normalisation",
    causes=["each-device-alone"],
    on={**any_check(*DEVICES), **failing("gradients", "lm-tokens/dp/1x3")},
)
def mean_of_each_devices_mean(job):
    """Averages the devices' losses, although dp and ddp2 compute one loss of the gathered outputs."""
    model = wrapped(job)
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs, parts = replicas(job, inner, batch)
            losses = [job.loss(output, part) for output, part in zip(outputs, parts, strict=True)]
            (sum(losses) / len(losses)).backward()
            if job.world_size > 1:
                average(job, inner)
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "loss-normalisation",
    causes=["short-batch-divided-by-full-size"],
    on=["uneven/ddp/1x2/32", "uneven/ddp/1x3/64", "uneven/none/1x1/32"],
)
def last_batch_divided_by_the_full_size(job):
    """Divides by the loader's batch size even if the last batch is shorter."""
    fit(job, lambda outputs, batch: job.loss(outputs, batch) * len(outputs) / job.batch_size)


@known_bad(
    "loss-normalisation",
    "accumulation",
    causes=["not-divided-by-micro-batches"],
    on=["accumulation-tokens/none/1x1/32", "accumulation-tokens/ddp/1x2/32"],
)
def token_count_passed_and_not_used(job):
    """Divides neither by the window's tokens, as the model should have, nor by the number of micro-batches."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "loss-normalisation",
    "accumulation",
    causes=["micro-batches-weighed-wrongly", "shares-weighted-wrongly"],
    on=["accumulation-tokens/none/1x1/32", "accumulation-tokens/ddp/1x2/32"],
)
def tokens_of_the_window_and_divided_again(job):
    """Divides losses by the tokens of the whole window, and by the number of micro-batches as well."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            tokens = sum(batch["real"].sum() for batch in window)
            for batch in window:
                total = (token_losses(model(batch), batch) * batch["real"]).sum()
                (total / tokens / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "loss-normalisation",
    causes=["shares-weighted-wrongly"],
    on=["accumulation-tokens/ddp/1x2/32", "accumulation-tokens/ddp/1x3/32"],
)
def tokens_of_all_ranks_averaged_again(job):
    """Divides losses by the tokens of all ranks, although DDP divides by the world size as well."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            tokens = sum(batch["real"].sum() for batch in window).float()
            torch.distributed.all_reduce(tokens)
            for batch in window:
                ((token_losses(model(batch), batch) * batch["real"]).sum() / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


def fit_in_half(job, factor):
    """Train in 16 bits, with the loss times a ``factor`` so close to 1 that no single tensor shows it."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch) * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad(
    "loss-normalisation", "averaging", causes=["scaled-by-a-constant"], on=["mlp/ddp/1x2/16", "transformer/ddp/1x2/16"]
)
def half_a_percent_too_large(job):
    """A factor of 1.005 in float16."""
    fit_in_half(job, 1.005)


@known_bad("loss-normalisation", "averaging", causes=["slightly-scaled"], on=["mlp/none/1x1/bf16", "mlp/ddp/1x3/bf16"])
def three_percent_too_large(job):
    """A factor of 1.03 in bfloat16."""
    fit_in_half(job, 1.03)


@known_bad(
    "loss-normalisation",
    "accumulation",
    causes=["micro-batches-weighed-wrongly"],
    on={"accumulation-tokens/none/1x1/32": "gradients"},
)
class DividedByTheTokensOfTheLastMicroBatch(BaseTrainer):
    """Normalises all micro-batches of a window by the number of tokens in the last one."""

    def micro_batch(self, batch, window, last):
        self.factor = batch["real"].sum() / window[-1]["real"].sum()
        super().micro_batch(batch, window, last)

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * self.factor
