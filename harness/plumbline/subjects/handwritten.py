"""Training by hand as torch's tutorials do, and with its DistributedDataParallel: the yardstick, and an example.

The other trainers of torch's own (``torch_*.py``) train with the same loop, and each says what it does otherwise.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline.subjects.declare import subject

PRECISIONS = ["64", "32", "16", "bf16"]

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "several-optimizers", "validation", "checkpoint",
    "metrics",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip

BEGINNING = {"epoch": 0, "samples": 0, "steps": 0}


@subject(
    name="torch",
    backends=["none", "ddp"],
    precisions=PRECISIONS,
    capabilities=CAPABILITIES,
    library="torch",
)
def train(job):
    fit(job, OneDevice(job) if job.backend == "none" else Ddp(job))


class OneDevice:
    """The model as it is: ``model`` is what trains, ``bare`` what evaluates, and ``optimizers`` mostly are one."""

    def __init__(self, job):
        self.model = self.bare = job.model().to(job.device)
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        """Return the context of a forward and its backward, ``last`` of its window or not."""
        return nullcontext()

    def before_step(self):
        """Do what is due once the window's last backward is over; here nothing is."""

    def clip(self, max_norm):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def val_share(self, job):
        """Return which of the held-out samples this rank evaluates; not through DDP, so shares may be unequal."""
        return range(job.data_rank, len(job.val_dataset), job.data_ranks)

    def save(self, file, others):
        """Write the states of model and optimizers, whole, and ``others``, once for all ranks; every rank calls it."""
        states = self.states()
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            torch.save({**states, **others}, file)

    def load(self, file, others):
        """Put model and optimizers, on every rank, where they were saved; return the others that were."""
        saved = torch.load(file, map_location=next(self.bare.parameters()).device, weights_only=True)
        self.bare.load_state_dict(saved["model"])
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(saved[f"optimizer {number}"])
        return {name: saved[name] for name in others}

    def states(self):
        every = {f"optimizer {number}": part.state_dict() for number, part in enumerate(self.optimizers)}
        return {"model": self.bare.state_dict(), **every}


class Ddp(OneDevice):
    """DistributedDataParallel: gradients are averaged over the ranks while the backward goes on."""

    def __init__(self, job):
        torch.distributed.init_process_group(job.comm)
        self.bare = job.model().to(job.device)
        device_ids = [job.device] if job.device.type == "cuda" else None
        self.model = DistributedDataParallel(self.bare, device_ids, find_unused_parameters=job.unused_parameters)
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        return nullcontext() if last else self.model.no_sync()


def fit(job, trainer):
    """Train ``job`` with a loop that one can read from top to bottom."""
    model, optimizers = trainer.model, trainer.optimizers
    sampler = DistributedSampler(job.dataset, job.data_ranks, job.data_rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    val_loader = DataLoader(job.val_dataset, batch_size=job.batch_size, sampler=trainer.val_share(job))
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    scaler = job.grad_scaler()
    parts = {"scaler": scaler, **{f"scheduler {number}": part for number, part in enumerate(schedulers)}}
    begun = load(job, trainer, parts) if job.resume else BEGINNING
    steps = begun["steps"]
    for epoch in range(begun["epoch"], job.epochs):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for number, batch in enumerate(loader):
            if epoch == begun["epoch"] and number * job.global_batch_size < begun["samples"]:
                continue  # trained on before the interruption
            place = number % job.accumulate
            window = min(job.accumulate, len(loader) - (number - place))  # the last one may be shorter
            last = place == window - 1
            batch = {name: column.to(job.device) for name, column in batch.items()}
            with trainer.backward_of(last):
                with job.autocast():
                    loss = job.loss(model(batch), batch)
                scaler.scale(loss / window).backward()
            total, count = total + float(loss) * len(batch["index"]), count + len(batch["index"])
            if last:
                trainer.before_step()
                if job.clip_norm is not None:
                    for optimizer in optimizers:
                        scaler.unscale_(optimizer)
                    trainer.clip(job.clip_norm)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scale = scaler.get_scale()
                scaler.update()
                skipped = scaler.get_scale() < scale
                for scheduler in () if skipped else schedulers:
                    scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                steps += 1
                if steps == job.stop_after_step:
                    progress = {"epoch": epoch, "samples": (number + 1) * job.global_batch_size, "steps": steps}
                    save(job, trainer, parts, progress)
                    return
            if job.validate_every and (number + 1) % job.validate_every == 0:
                job.log("val_loss", evaluate(job, trainer, val_loader))
        if count:  # nothing is left of an epoch at whose end training was interrupted
            job.log("loss", mean_over_ranks(job, total, count))


def mean_over_ranks(job, total, count):
    """Return the mean over the samples of all ranks; this one has ``count`` of them, which sum up to ``total``."""
    sums = torch.tensor([total, count], dtype=torch.float64, device=job.device)
    if job.world_size > 1:
        torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def save(job, trainer, parts, progress):
    """Write what training changes.

    The place in the epoch is counted in samples over all ranks: whoever goes on may have another number of them.
    """
    others = {name: part.state_dict() for name, part in parts.items()}
    trainer.save(f"{job.checkpoint_dir}/checkpoint", {**others, "progress": progress})


def load(job, trainer, parts):
    others = {name: part.state_dict() for name, part in parts.items()}
    saved = trainer.load(f"{job.checkpoint_dir}/checkpoint", {**others, "progress": dict(BEGINNING)})
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["progress"]


@torch.no_grad()
def evaluate(job, trainer, loader):
    trainer.bare.eval()
    total = 0.0
    for batch in loader:
        batch = {name: column.to(job.device) for name, column in batch.items()}
        with job.autocast():
            total += float(job.loss(trainer.bare(batch), batch)) * len(batch["index"])
    trainer.bare.train()
    return mean_over_ranks(job, total, len(loader.sampler))
