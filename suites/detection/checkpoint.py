"""Training that stops, and does not go on where it stopped."""

from __future__ import annotations

import torch
from expect import known_bad
from loop import ddp, loader

UNSEEN = "no launch stops and resumes yet, and no check compares what comes of it"
CELLS = ["cnn-batchnorm/ddp/1x2/32"]


def fit(job, *, optimizer_state=True, all_ranks=True, epoch_restored=True):
    """Train up to ``job.stop_after_step``; a resumed job loads what was saved, as far as it is told to."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    file = f"{job.checkpoint_dir}/last.pt"
    saved = {"epoch": 0, "step": 0}
    if job.resume:
        saved = torch.load(file)
        if all_ranks or job.rank == 0:
            model.module.load_state_dict(saved["model"])
        if optimizer_state:
            optimizer.load_state_dict(saved["optimizer"])
        if not epoch_restored:
            saved = {**saved, "epoch": 0}
    for epoch in range(saved["epoch"], job.epochs):
        for step, batch in enumerate(loader(job, epoch)):
            if epoch == saved["epoch"] and step < saved["step"]:
                continue
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            done = epoch * len(loader(job, epoch)) + step + 1
            if done == job.stop_after_step and not job.resume:
                if job.rank == 0:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({**state, "epoch": epoch, "step": step + 1}, file)
                return


@known_bad("checkpoint", on=CELLS, unseen=UNSEEN)
def optimizer_state_dropped(job):
    """Momentum restarts from nothing."""
    fit(job, optimizer_state=False)


@known_bad("checkpoint", on=CELLS, unseen=UNSEEN)
def only_rank_zero_loads(job):
    """The other ranks go on from the weights they began with."""
    fit(job, all_ranks=False)


@known_bad("checkpoint", on=CELLS, unseen=UNSEEN)
def epoch_not_restored(job):
    """The first epoch's order is replayed."""
    fit(job, epoch_restored=False)
