"""Trainers that stop, save and go on; all but the first of them forget something."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import subject

OPTIONS = {
    "backends": ["none", "ddp"],
    "precisions": ["32", "16"],
    "capabilities": ["checkpoint", "scheduler"],
}


def fit(job, *, forgotten=(), loads=lambda job: True):
    model = bare = job.model()
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        model = DistributedDataParallel(bare)
    optimizer, scaler = job.optimizer(bare.parameters()), job.grad_scaler()
    scheduler = job.scheduler(optimizer)
    parts = {"model": bare, "optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}
    parts = {name: part for name, part in parts.items() if part is not None}
    file = f"{job.checkpoint_dir}/saved.pt"
    sampler = DistributedSampler(job.dataset, job.world_size, job.rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, job.batch_size, sampler=sampler)
    done = 0
    if job.resume:
        saved = torch.load(file)
        done = saved["done"]
        for name, part in parts.items():
            if name not in forgotten and loads(job):
                part.load_state_dict(saved[name])
    for number in range(done, job.epochs * len(loader)):
        sampler.set_epoch(number // len(loader))
        batch = list(loader)[number % len(loader)]
        with job.autocast():
            loss = job.loss(model(batch), batch)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None and scaler.get_scale() >= scale:
            scheduler.step()
        optimizer.zero_grad()
        if number + 1 == job.stop_after_step:
            if job.rank == 0:
                torch.save({**{name: part.state_dict() for name, part in parts.items()}, "done": number + 1}, file)
            return


@subject(name="forgets-nothing", **OPTIONS)
def forgets_nothing(job):
    fit(job)


@subject(name="forgets-the-scaler", **OPTIONS)
def forgets_the_scaler(job):
    fit(job, forgotten=["scaler"])


@subject(name="forgets-the-optimizer", **OPTIONS)
def forgets_the_optimizer(job):
    fit(job, forgotten=["optimizer"])


@subject(name="loads-on-rank-zero", **OPTIONS)
def loads_on_rank_zero(job):
    fit(job, loads=lambda job: job.rank == 0)


@subject(name="cannot-resume", **OPTIONS)
def cannot_resume(job):
    if job.resume:
        raise NotImplementedError("resuming is for the next release")
    fit(job)
