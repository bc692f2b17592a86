"""Ray Train under test: TorchTrainer starts its own worker processes, which prepare a model and a loader with Ray.

The loop that the workers run is one's own, as in Ray's documentation; Ray starts them, connects them, wraps the model,
and gives each worker its samples.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else it writes a token into the user's home

with installed_by("pip install 'ray[train]'"):
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

CAPABILITIES = [
    "accumulation", "clipping", "scheduler",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip


@subject(
    name="ray",
    backends=["none", "ddp"],
    precisions={"cuda": ["64", "32", "16", "bf16"], "cpu": ["64", "32", "bf16"]},
    capabilities=CAPABILITIES,
    library="ray",
    launch="node",
    max_nodes=1,  # a cluster of several is started by Ray's own commands, not by a script
)
def train(job):
    on_gpu = job.accelerator == "cuda"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # it names sockets, whose paths must be short
    ray.init(
        num_cpus=job.gpus,
        num_gpus=job.gpus if on_gpu else 0,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        TorchTrainer(
            work,
            train_loop_config={"job": job},
            torch_config=TorchConfig(backend=job.comm),
            scaling_config=ScalingConfig(num_workers=job.gpus, use_gpu=on_gpu),
            run_config=RunConfig(name="plumbline", storage_path=folder),
        ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def work(config):
    """Train on one worker, which Ray kills when all have trained."""
    try:
        loop(config["job"])
    finally:
        config["job"].finished()


def loop(job):
    context = ray.train.get_context()
    torch.manual_seed(job.seed + context.get_world_rank())
    bare = job.model()
    model = prepare_model(bare, parallel_strategy_kwargs=_wrapping(job))
    optimizer = job.optimizer(bare.parameters())
    scheduler = job.scheduler(optimizer)
    scaler = job.grad_scaler()
    loader = prepare_data_loader(DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle))
    for epoch in range(job.epochs):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            first = number - number % job.accumulate
            window = min(job.accumulate, len(loader) - first)
            last = number + 1 == first + window
            with nullcontext() if last or context.get_world_size() == 1 else model.no_sync():
                with job.autocast():
                    loss = job.loss(model(batch), batch)
                scaler.scale(loss / window).backward()
            if last:
                step(job, bare, optimizer, scheduler, scaler)
        ray.train.report({"epoch": epoch})


def step(job, model, optimizer, scheduler, scaler):
    if job.clip_norm is not None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scheduler is not None and scaler.get_scale() >= scale:
        scheduler.step()


def _wrapping(job):
    return {"find_unused_parameters": job.unused_parameters} if job.world_size > 1 else {}
