"""Random numbers that should differ between ranks, devices or steps, but do not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import any_check, known_bad
from loop import average, ddp, loader, replicas, wrapped
from torch.utils.checkpoint import checkpoint

RANKS = ["random-masks/ddp/1x2/32", "random-masks/ddp/1x3/32"]
ANYWHERE = ["random-masks/none/1x1/32", "random-masks/ddp/1x3/32"]
NODES = ["random-masks/ddp/2x2/32"]


def fit(job, model, *, at_epoch=None, at_batch=None, after_batch=None):
    """Train correctly; call ``at_epoch(epoch)``, ``at_batch(number)`` and ``after_batch(number)`` if given."""
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        if at_epoch:
            at_epoch(epoch)
        for number, batch in enumerate(loader(job, epoch)):
            if at_batch:
                at_batch(number)
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if after_batch:
                after_batch(number)


@known_bad("rng", causes=["one-seed-on-all-ranks"], on={**any_check(*RANKS, *NODES), "random-masks/ddp/1x3/32": "rng"})
def one_seed_on_all_ranks(job):
    """Seeds all ranks alike, so they drop the same units of different samples."""
    torch.manual_seed(job.seed)
    fit(job, ddp(job))


@known_bad("rng", causes=["seeded-anew-every-step"], on=ANYWHERE)
def seeded_anew_every_step(job):
    """Seeds before every batch, so each batch has the masks of the first."""
    fit(job, wrapped(job), at_batch=lambda number: torch.manual_seed(job.seed + job.rank))


@known_bad("rng", causes=["seeded-anew-every-epoch"], on=ANYWHERE)
def seeded_anew_every_epoch(job):
    """Seeds at the beginning of every epoch, so each epoch has the masks of the one before."""
    fit(job, wrapped(job), at_epoch=lambda epoch: torch.manual_seed(job.seed + job.rank))


@known_bad("rng", causes=["seeded-anew-every-epoch"], on=ANYWHERE)
def seed_of_rank_and_step_added(job):
    """Adds seed, rank and step: rank 0 draws in step 1 what rank 1 drew in step 0, and epochs are alike."""
    fit(job, wrapped(job), at_batch=lambda number: torch.manual_seed(job.seed + job.rank + number))


@known_bad(
    "rng",
    causes=["replicas-draw-alike"],
    on=["random-masks/dp/1x2/32", "random-masks/dp/1x3/32", "random-masks/ddp2/2x2/32"],
)
def replicas_share_a_seed(job):
    """Seeds every device's generator alike, so the replicas drop the same units."""
    model = wrapped(job)
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    seed = job.rank

    def seed_this_device(*_):
        torch.manual_seed(seed)

    inner.register_forward_pre_hook(seed_this_device)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            seed += job.world_size
            outputs, _ = replicas(job, inner, batch)
            job.loss(torch.cat(outputs), batch).backward()
            if job.world_size > 1:
                average(job, inner)
            optimizer.step()
            optimizer.zero_grad()


@known_bad("rng", causes=["seeded-by-local-rank"], on=NODES)
def seeded_by_the_local_rank(job):
    """Seeds with the local rank, so nodes draw alike."""
    torch.manual_seed(job.seed + job.local_rank)
    fit(job, ddp(job))


@known_bad("rng", causes=["seeded-by-node"], on=NODES)
def seeded_by_the_node(job):
    """Seeds with the node rank, so the ranks of a node draw alike."""
    torch.manual_seed(job.seed + job.node_rank)
    fit(job, ddp(job))


@known_bad("rng", causes=["one-state-on-all-ranks"], on=RANKS)
def rank_zeros_state_for_all(job):
    """Broadcasts rank 0's generator state to all ranks after an evaluation."""

    def evaluate(number):
        if number == 1:
            state = torch.get_rng_state()
            dist.broadcast(state, 0)
            torch.set_rng_state(state)

    fit(job, ddp(job), after_batch=evaluate)


@known_bad("rng", causes=["a-rank-lags"], on=RANKS)
def one_stream_a_few_numbers_later(job):
    """Seeds all ranks alike, and then discards only ``rank`` numbers on each."""
    torch.manual_seed(job.seed)
    torch.rand(job.rank)
    fit(job, ddp(job))


@known_bad("rng", causes=["seeded-anew-every-step"], on=ANYWHERE)
def state_set_back_after_every_step(job):
    """Restores the generator's initial state after every batch, meant to hide an evaluation."""
    state = torch.get_rng_state()
    fit(job, wrapped(job), after_batch=lambda number: torch.set_rng_state(state))


@known_bad("rng", causes=["one-mask-for-several-samples"], on=ANYWHERE)
def one_mask_for_the_whole_batch(job):
    """Draws one mask, and broadcasts it over the samples."""
    model = wrapped(job)
    for layer in model.modules():
        if hasattr(layer, "draws"):
            layer.register_forward_hook(lambda layer, args, drawn: drawn[:1].expand_as(drawn))
            layer._forward_hooks.move_to_end(next(iter(layer._forward_hooks)))  # the recorder must see this
    fit(job, model)


@known_bad(
    "rng",
    causes=["never-drops", "in-evaluation-mode"],
    on={**any_check(*ANYWHERE), "random-masks/none/1x1/32": "rng", "dropout/none/1x1/32": "gradients"},
)
def never_drops(job):
    """Trains in evaluation mode, so no units are dropped."""
    fit(job, wrapped(job).eval())


@known_bad("rng", causes=["masks-drawn-anew-in-the-backward"], on=ANYWHERE)
def recomputed_with_other_masks(job):
    """Recomputes activations in the backward without preserving the generator's state."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs = checkpoint(model, batch, use_reentrant=False, preserve_rng_state=False)
            job.loss(outputs, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
