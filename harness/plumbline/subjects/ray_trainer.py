"""Ray Train: TorchTrainer starts worker processes, wraps the model, and gives each worker its samples.

The workers run a training loop as in Ray's documentation.
"""

import os
import shutil
import tempfile
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader

from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.subjects.released import ddp_options, installed_by, windows

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise it writes a token to the home directory

with installed_by("pip install 'ray[train]'"):
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model


@subject(
    name="ray",
    backends=["none", "ddp"],
    precisions={"cuda": ["64", "32", "16", "bf16"], "cpu": ["64", "32", "bf16"]},
    capabilities=CAPABILITIES - {"several-optimizers", "validation", "checkpoint", "metrics"},
    library="ray",
    launch="node",
    max_nodes=1,  # Ray's own commands start larger clusters
)
def train(job):
    on_gpu = job.accelerator == "cuda"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of Ray's sockets must be short
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
    # Ray kills the workers when all have finished training.
    try:
        loop(config["job"])
    finally:
        config["job"].finished()


def loop(job):
    context = ray.train.get_context()
    torch.manual_seed(job.seed + context.get_world_rank())
    bare = job.model()
    model = prepare_model(bare, parallel_strategy_kwargs=ddp_options(job))
    optimizer = job.optimizer(bare.parameters())
    scheduler = job.scheduler(optimizer)
    scaler = job.grad_scaler()
    loader = prepare_data_loader(DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle))
    for epoch in range(job.epochs):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for _, batch, window, last in windows(loader, job.accumulate):
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
