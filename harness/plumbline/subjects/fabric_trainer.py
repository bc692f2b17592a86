"""Lightning Fabric: a training loop with its strategies, samplers, precision and clipping."""

import torch
from torch.utils.data import DataLoader

from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.subjects.released import installed_by, weighted, windows
from plumbline.subjects.torch_fsdp import COMPUTES_ON_A_CPU, shard
from plumbline.subjects.torch_fsdp import REFUSED as FSDP_LACKS

with installed_by("pip install lightning"):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision
    from lightning.fabric.strategies import DDPStrategy

    try:
        from lightning.fabric.strategies import ModelParallelStrategy
    except ImportError:  # before lightning 2.3
        ModelParallelStrategy = None

PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@subject(
    name="fabric",
    backends=["none", "ddp"],
    precisions={one: list(PRECISIONS) for one in ("cuda", "cpu")},
    capabilities=CAPABILITIES,
    library="lightning",
)
def train(job):
    ddp = DDPStrategy(process_group_backend=job.comm, find_unused_parameters=job.unused_parameters)
    fabric = launched(job, "auto" if job.backend == "none" else ddp)
    bare = job.model()
    model, *optimizers = fabric.setup(bare, *job.optimizers(bare.parameters()))
    fit(job, fabric, model, optimizers)


@subject(
    name="fabric",
    backends=["fsdp"] if ModelParallelStrategy else [],
    precisions={"cuda": ["32", "bf16"], "cpu": ["32", "bf16"] if COMPUTES_ON_A_CPU else []},  # others are refused
    capabilities=CAPABILITIES - FSDP_LACKS,
    library="lightning",
)
def train_sharded(job):
    # ModelParallelStrategy is Fabric's way to FSDP2. Its flag "fsdp" means FSDP1 and refuses a CPU.
    options = {"data_parallel_size": job.world_size, "tensor_parallel_size": 1, "process_group_backend": job.comm}
    fabric = launched(job, ModelParallelStrategy(lambda model, mesh: shard(model, mesh["data_parallel"]), **options))
    model = fabric.setup_module(job.model())
    optimizers = fabric.setup_optimizers(*job.optimizers(model.parameters()))
    fit(job, fabric, model, optimizers if isinstance(optimizers, tuple) else [optimizers])


def launched(job, strategy):
    fabric = Fabric(
        accelerator="gpu" if job.accelerator == "cuda" else "cpu",
        devices=job.gpus,
        num_nodes=job.num_nodes,
        strategy=strategy,
        **_precision(job),
    )
    fabric.launch()
    fabric.seed_everything(job.seed, workers=True, verbose=False)
    return fabric


def fit(job, fabric, model, optimizers):
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    loader, val_loader = fabric.setup_dataloaders(
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        DataLoader(job.val_dataset, batch_size=job.batch_size),
    )
    state = {"model": model, "epoch": 0, "batches": 0, "steps": 0}
    state |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
    state |= {f"scheduler {number}": scheduler for number, scheduler in enumerate(schedulers)}
    if job.resume:
        fabric.load(f"{job.checkpoint_dir}/checkpoint.ckpt", state)
    for epoch in range(state["epoch"], job.epochs):
        sums = torch.zeros(2, dtype=torch.float64, device=fabric.device)
        for number, batch, window, last in windows(loader, job.accumulate):
            if epoch == state["epoch"] and number < state["batches"]:
                continue  # trained before the interruption
            with fabric.no_backward_sync(model, enabled=not last):
                loss = job.loss(model(batch), batch)
                fabric.backward(loss / window)
            if last:
                if job.clip_norm is not None:
                    _clip(job, fabric, model, optimizers)
                for optimizer in optimizers:
                    optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()  # Fabric does not say whether its scaler skipped the step
                for optimizer in optimizers:
                    optimizer.zero_grad()
                state["steps"] += 1
                if state["steps"] == job.stop_after_step:
                    state |= {"epoch": epoch, "batches": number + 1}
                    fabric.save(f"{job.checkpoint_dir}/checkpoint.ckpt", state)
                    return
            sums += weighted(loss, batch)
            if job.validate_every and (number + 1) % job.validate_every == 0:
                job.log("val_loss", evaluate(job, fabric, model, val_loader))
        if sums.any():  # not if training was interrupted at the end of the epoch
            job.log("loss", _mean_over_ranks(fabric, sums))


@torch.no_grad()
def evaluate(job, fabric, model, loader):
    model.eval()
    sums = sum(weighted(job.loss(model(batch), batch), batch) for batch in loader)
    model.train()
    return _mean_over_ranks(fabric, sums)


def _clip(job, fabric, model, optimizers):
    if len(optimizers) == 1:
        fabric.clip_gradients(model, optimizers[0], max_norm=job.clip_norm, error_if_nonfinite=False)
        return
    # Fabric clips the gradients of one optimizer at a time, and unscales each optimizer's gradients as it steps.
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    scale = 1.0 if scaler is None else scaler.get_scale()
    torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm * scale)


def _mean_over_ranks(fabric, sums):
    total, count = fabric.all_reduce(sums, reduce_op="sum")
    return total / count


def _precision(job):
    # On a CPU, the flag "16-mixed" would mean bfloat16.
    if job.precision == "16" and job.accelerator == "cpu":
        return {"plugins": [MixedPrecision("16-mixed", "cpu")]}
    return {"precision": PRECISIONS[job.precision]}
