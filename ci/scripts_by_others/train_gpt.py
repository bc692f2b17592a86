"""A plain loop over random windows of a text, with accumulation, clipping and mixed precision.

Written anew after karpathy/nanoGPT, train.py (MIT): the same calls in the same order, with settings at the top.
Differences: the loop is in a function; the model's file is not here; autocast and GradScaler also work on the CPU;
nothing is compiled, evaluated or saved.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

gradient_accumulation_steps = 5 * 8  # over all ranks
batch_size = 12
block_size = 64
learning_rate = 6e-4
max_iters = 100
grad_clip = 1.0  # 0.0: no clipping
backend = "nccl"
device = "cuda"
dtype = "float32"  # or bfloat16, float16
data = torch.randint(50, (10_000,))


def get_batch():
    """Return random windows, and the same windows shifted by a token."""
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


def make_model():
    """Return the model; ``model(X, Y)`` returns logits and loss."""
    raise NotImplementedError("put your GPT here")


def configure_optimizers(model):
    """Return the model's optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))


def train():
    """Train on this rank, or on one device."""
    micro_steps = gradient_accumulation_steps
    ddp = int(os.environ.get("RANK", -1)) != -1
    if ddp:
        init_process_group(backend=backend)
        seed_offset = int(os.environ["RANK"])  # each rank draws different windows
        assert micro_steps % int(os.environ["WORLD_SIZE"]) == 0
        micro_steps //= int(os.environ["WORLD_SIZE"])
    else:
        seed_offset = 0
    torch.manual_seed(1337 + seed_offset)
    device_type = "cuda" if "cuda" in device else "cpu"
    ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    ctx = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)

    model = make_model()
    model.to(device)
    scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))
    optimizer = configure_optimizers(model)
    if ddp:
        model = DDP(model, device_ids=[torch.device(device).index] if device_type == "cuda" else None)

    X, Y = get_batch()  # noqa: N806
    iter_num = 0
    while True:
        for param_group in optimizer.param_groups:
            param_group["lr"] = learning_rate

        for micro_step in range(micro_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == micro_steps - 1
            with ctx:
                _logits, loss = model(X, Y)
                loss = loss / micro_steps
            X, Y = get_batch()  # noqa: N806 (while the backward goes on)
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        iter_num += 1
        if iter_num > max_iters:
            break

    if ddp:
        destroy_process_group()
