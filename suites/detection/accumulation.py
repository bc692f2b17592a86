"""Wrong gradient accumulation: micro-batches weighted wrongly, lost, or stepped at the wrong time."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from expect import any_check, failing, known_bad
from loop import alone, ddp, loader, windows, wrapped
from otherwise import by_iterations

CELLS = [
    "accumulation/none/1x1/32",
    "accumulation/ddp/1x2/32",
    "accumulation/ddp/1x3/16",
    "accumulation/ddp/1x2/bf16-true",
]
DDP = ["accumulation/ddp/1x2/32", "accumulation/ddp/1x3/64"]
ITERATED = ["accumulation/ddp/1x2/32", "accumulation/ddp/1x4/32"]


def backward(job, model, scaler, batch, divisor):
    """Add one micro-batch's gradients to those accumulated so far."""
    with job.autocast():
        loss = job.loss(model(batch), batch) / divisor
    scaler.scale(loss).backward()


def train_windows(job, *, divisor=len, cut=windows, before_batch=lambda optimizer: None, zeroes=True):
    """Train on the windows that ``cut`` returns; divide each batch's loss by ``divisor(window)``."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for window in cut(job, epoch):
            for batch in window:
                before_batch(optimizer)
                backward(job, model, scaler, batch, divisor(window))
            scaler.step(optimizer)
            scaler.update()
            if zeroes:
                optimizer.zero_grad()


@known_bad("accumulation", causes=["not-divided-by-micro-batches"], on=CELLS)
def not_divided(job):
    """Sums the losses of a window without dividing by the number of micro-batches."""
    train_windows(job, divisor=lambda window: 1)


@known_bad("accumulation", causes=["divided-twice"], on=CELLS)
def divided_twice(job):
    """Divides the loss by the number of micro-batches twice."""
    train_windows(job, divisor=lambda window: len(window) * len(window))


@known_bad(
    "accumulation",
    causes=["short-window-divided-by-full-length"],
    on={**any_check(*CELLS), "accumulation/ddp/1x3/32": "gradients"},
)
def short_window_divided_by_the_full_length(job):
    """Divides the short last window of an epoch by ``accumulate`` instead of its own length."""
    train_windows(job, divisor=lambda window: job.accumulate)


@known_bad("accumulation", causes=["only-last-micro-batch"], on=CELLS)
def zeroed_for_every_micro_batch(job):
    """Zeroes gradients before every micro-batch, so only the last one of a window counts."""
    train_windows(job, before_batch=lambda optimizer: optimizer.zero_grad(), zeroes=False)


@known_bad(
    "accumulation",
    causes=["first-micro-batches-missing"],
    on={**any_check("validation/none/1x1/32", "validation/ddp/1x2/16"), "validation/ddp/1x3/32": "gradients"},
)
def validation_wipes_the_window(job):
    """Zeroes the accumulated gradients when an evaluation interrupts a window."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        number = 0
        for window in windows(job, epoch):
            for batch in window:
                backward(job, model, scaler, batch, len(window))
                number += 1
                if number % job.validate_every == 0 and batch is not window[-1]:
                    model.eval()
                    model.zero_grad()
                    model.train()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad(
    "accumulation",
    "rng",
    "batch-coupling",
    "buffers",
    causes=["in-evaluation-mode"],
    on={**any_check("validation/none/1x1/32", "validation/ddp/1x2/32"), "validation/none/1x1/32": "gradients"},
)
def validation_leaves_evaluation_mode(job):
    """Stays in evaluation mode after the first evaluation, so dropout is off from then on."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        number = 0
        for window in windows(job, epoch):
            for batch in window:
                backward(job, model, scaler, batch, len(window))
                number += 1
                if number % job.validate_every == 0:
                    model.eval()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad(
    "accumulation", causes=["short-last-window-dropped"], on={**any_check(*CELLS), "accumulation/none/1x1/32": "steps"}
)
def short_last_window_dropped(job):
    """Discards the gradients of a short last window instead of stepping."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                backward(job, model, scaler, batch, job.accumulate)
            if len(window) == job.accumulate:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()


@known_bad("accumulation", causes=["short-last-window-dropped"], on=CELLS)
def short_last_window_never_loaded(job):
    """Drops the batches that do not fill a window."""

    def whole(job, epoch):
        return [window for window in windows(job, epoch) if len(window) == job.accumulate]

    train_windows(job, cut=whole)


@known_bad("accumulation", causes=["window-over-the-end-of-the-epoch"], on=CELLS)
def window_runs_over_the_end_of_the_epoch(job):
    """Counts micro-batches across epochs: a window may begin in one epoch and end in the next."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    count = 0
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            backward(job, model, scaler, batch, job.accumulate)
            count += 1
            if count % job.accumulate == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@known_bad("accumulation", causes=["stepped-every-micro-batch"], on=CELLS)
def stepped_for_every_micro_batch(job):
    """Ignores ``accumulate`` and steps after every micro-batch."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            backward(job, model, scaler, batch, 1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad("accumulation", causes=["stepped-every-micro-batch"], on=CELLS)
def stepped_for_every_micro_batch_zeroed_for_every_window(job):
    """Steps after every micro-batch, but zeroes gradients only at the end of a window."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                backward(job, model, scaler, batch, len(window))
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()


@known_bad("accumulation", causes=["windows-of-another-length"], on=CELLS)
def window_one_too_long(job):
    """Makes windows one micro-batch too long, by an off-by-one error in the counter."""

    def longer(job, epoch):
        batches, size = list(loader(job, epoch)), job.accumulate + 1
        return [batches[first : first + size] for first in range(0, len(batches), size)]

    train_windows(job, cut=longer)


@known_bad("accumulation", "sync", causes=["some-micro-batches-not-synchronised"], on=DDP)
def synchronised_with_the_first_micro_batch(job):
    """Uses ``no_sync`` for the wrong micro-batches: averages the first one, and not the others."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for index, batch in enumerate(window):
                with contextlib.nullcontext() if index == 0 else model.no_sync():
                    (job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("accumulation", "sync", causes=["not-synchronised"], on=DDP)
def never_synchronised_in_a_short_window(job):
    """All-reduces only at the ``accumulate``-th micro-batch, and so never in a short last window."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for index, batch in enumerate(window):
                with contextlib.nullcontext() if index == job.accumulate - 1 else model.no_sync():
                    (job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("accumulation", "averaging", causes=["reduced-with-every-micro-batch"], on=DDP)
def summed_for_every_micro_batch_divided_once(job):
    """All-reduces the accumulated gradients after every micro-batch, but divides by the world size once."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                (job.loss(model(batch), batch) / len(window)).backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            for parameter in model.parameters():
                parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "accumulation",
    "optimizer",
    causes=["previous-step-not-zeroed"],
    on={**any_check(*CELLS[:2], "mlp/none/1x1/64"), **failing("gradients", "mlp/ddp/1x2")},
)
def never_zeroed(job):
    """Never zeroes gradients, so they accumulate over all steps."""
    train_windows(job, zeroes=False)


@known_bad("accumulation", causes=["accumulates-unasked"], on=["mlp/ddp/1x2/32", "mlp/none/1x1/32"])
def accumulates_although_nobody_asked(job):
    """Accumulates two batches per step, although the workload does not ask for it."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for number, batch in enumerate(loader(job, epoch)):
            (job.loss(model(batch), batch) / 2).backward()
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()


@known_bad("accumulation", causes=["not-divided-by-micro-batches"], on=ITERATED, data="iterations")
def window_not_divided(job):
    """Sums the losses of a window instead of averaging them."""
    by_iterations(job, divisor=1)


@known_bad("accumulation", causes=["divided-twice"], on=ITERATED, data="iterations")
def window_divided_by_its_square(job):
    """Divides the loss by the window length twice."""
    by_iterations(job, divisor=job.accumulate**2)


@known_bad("accumulation", causes=["short-last-window-dropped"], on=ITERATED, data="iterations")
def one_batch_a_window(job):
    """Ignores ``accumulate``: takes the right number of steps, but each on a single batch."""
    by_iterations(job, accumulate=1)


@known_bad("accumulation", "data", causes=["stepped-every-micro-batch"], on=ITERATED, data="iterations")
def iterations_counted_in_batches(job):
    """Steps after every batch, and takes as many steps as all windows have batches."""
    by_iterations(job, accumulate=1, steps=job.steps * job.accumulate)
