"""Clipping at the wrong time, of the wrong gradients, or by the wrong norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from expect import any_check, failing, known_bad
from loop import alone, average, loader, sharded, wrapped
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

CELLS = ["clipping/ddp/1x2/32", "clipping-adamw/ddp/1x3/64", "clipping/none/1x1/32"]
DDP = ["clipping/ddp/1x2/32", "clipping-adamw/ddp/1x3/64"]


def fit(job, clip):
    """Train correctly, with ``clip(parameters)`` between backward and step."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            clip(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "clipping",
    causes=["clipped-before-unscaling"],
    on={**any_check("clipping/ddp/1x2/16", "clipping/none/1x1/16"), "clipping/ddp/1x3/16": "gradients"},
)
def clipped_before_unscaling(job):
    """Clips gradients before unscaling them."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            clip_grad_norm_(model.parameters(), job.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad(
    "clipping",
    causes=["clipped-before-averaging"],
    on={**any_check(*DDP), "clipping/ddp/1x3/32": "gradients", "clipping-adamw/ddp/1x3/32": "gradients"},
)
def clipped_before_averaging(job):
    """Each rank clips its own gradients before they are averaged."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            clip_grad_norm_(model.parameters(), job.clip_norm)
            average(job, model)
            optimizer.step()
            optimizer.zero_grad()


@known_bad("clipping", causes=["not-clipped"], on=CELLS)
def clipped_after_the_step(job):
    """Clips gradients after the step."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.zero_grad()


@known_bad(
    "clipping",
    causes=["not-clipped"],
    on={**any_check(*CELLS), "clipping/none/1x1/32": "gradients", "clipping-adamw/ddp/1x3/64": "gradients"},
)
def never_clipped(job):
    """Ignores ``clip_norm``."""
    fit(job, lambda parameters: None)


@known_bad("clipping", causes=["clipped-tensor-by-tensor"], on=CELLS)
def clipped_tensor_by_tensor(job):
    """Clips each tensor to the norm meant for all tensors together."""
    fit(job, lambda parameters: [clip_grad_norm_([parameter], job.clip_norm) for parameter in parameters])


@known_bad("clipping", causes=["clipped-by-value"], on=CELLS)
def clipped_by_value(job):
    """Clamps entries instead of clipping the norm."""
    fit(job, lambda parameters: clip_grad_value_(parameters, job.clip_norm))


@known_bad("clipping", causes=["clipped-to-another-length"], on=CELLS)
def clipped_by_the_largest_entry(job):
    """Clips by the infinity norm instead of the 2-norm."""
    fit(job, lambda parameters: clip_grad_norm_(parameters, job.clip_norm, norm_type=float("inf")))


@known_bad("clipping", causes=["clipped-to-another-length"], on=CELLS)
def clipped_by_the_sum_of_entries(job):
    """Clips by the 1-norm instead of the 2-norm."""
    fit(job, lambda parameters: clip_grad_norm_(parameters, job.clip_norm, norm_type=1.0))


@known_bad("clipping", causes=["clipped-to-another-length"], on=DDP)
def clipped_to_a_ranks_part(job):
    """Divides the limit by the world size."""
    fit(job, lambda parameters: clip_grad_norm_(parameters, job.clip_norm / job.world_size))


@known_bad("clipping", causes=["clipped-to-another-length"], on=CELLS)
def clipped_to_the_square_root(job):
    """Compares the squared norm, instead of the norm, with the limit."""

    def clip(parameters):
        square = sum(parameter.grad.square().sum() for parameter in parameters)
        for parameter in parameters:
            parameter.grad *= min(1.0, job.clip_norm / float(square))

    fit(job, clip)


@known_bad("clipping", causes=["clipped-to-another-length"], on=CELLS)
def always_scaled_to_the_limit_of_matrices(job):
    """Computes the norm of matrices only, but scales all tensors."""

    def clip(parameters):
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters if p.dim() > 1]))
        for parameter in parameters:
            parameter.grad *= min(1.0, job.clip_norm / float(norm))

    fit(job, clip)


@known_bad("clipping", causes=["clipped-to-another-length"], on=DDP)
def clipped_on_rank_zero_only(job):
    """Only the main process clips."""
    fit(job, lambda parameters: clip_grad_norm_(parameters, job.clip_norm) if job.rank == 0 else None)


@known_bad("clipping", causes=["clipped-to-another-length"], on=DDP)
def clipped_by_the_ranks_own_norm(job):
    """Clips the average by the norm of the rank's own gradients."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
            average(job, model)
            for parameter in model.parameters():
                parameter.grad *= min(1.0, job.clip_norm / float(norm))
            optimizer.step()
            optimizer.zero_grad()


@known_bad("clipping", causes=["clipped-to-another-length"], on=DDP)
def norms_added_over_ranks(job):
    """Sums the squared norm over the ranks, as if gradients were sharded."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            average(job, model)
            square = sum(parameter.grad.square().sum() for parameter in model.parameters())
            dist.all_reduce(square)
            for parameter in model.parameters():
                parameter.grad *= min(1.0, job.clip_norm / float(square.sqrt()))
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "clipping",
    causes=["clipped-although-nobody-asked"],
    on=["mlp/none/1x1/32", "mlp/ddp/1x2/64", "transformer/ddp/1x2/32"],
)
def clipped_by_default(job):
    """Clips to a default limit, although the workload does not ask for clipping."""
    fit(job, lambda parameters: clip_grad_norm_(parameters, 0.3))


@known_bad(
    "clipping",
    causes=["clipped-although-nobody-asked"],
    on={**any_check("mlp/ddp/1x2/32", "mlp/ddp/1x3/64"), **failing("gradients", "mlp/ddp/1x2")},
)
def clipped_by_default_before_averaging(job):
    """Each rank clips its own gradients, although the workload does not ask for clipping."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            clip_grad_norm_(model.parameters(), 0.3)
            average(job, model)
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "clipping",
    causes=["clipped-shard-by-shard"],
    on=["clipping/fsdp/1x2/32", "clipping/fsdp/1x3/32", "clipping-adamw/fsdp/1x3/64"],
)
def each_shard_by_its_own_norm(job):
    """Each rank clips by the norm of its own shards."""
    model = sharded(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            shards = [parameter.grad.to_local() for parameter in model.parameters()]
            norm = torch.linalg.vector_norm(torch.stack([shard.norm() for shard in shards]))
            for shard in shards:
                shard *= min(1.0, job.clip_norm / float(norm))
            optimizer.step()
            optimizer.zero_grad()
