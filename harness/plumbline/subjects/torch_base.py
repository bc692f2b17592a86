"""A hand-written training loop as in torch's tutorials, where each device has the whole model.

The other torch trainers (``torch_*.py``) use the same loop and override what they do differently.
"""

import inspect
from contextlib import nullcontext

import torch.distributed
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.subjects.released import windows

PRECISIONS = ["64", "32", "16", "bf16", "bf16-true"]
MASTER_WEIGHTS = "bf16-master"

BEGINNING = {"epoch": 0, "samples": 0, "steps": 0}


@subject(
    name="torch",
    backends=["none", "ddp"],
    precisions=[*PRECISIONS, MASTER_WEIGHTS],
    capabilities=CAPABILITIES,
    library="torch",
)
def train(job):
    alone, together = (MasteredDevice, MasteredDdp) if job.precision == MASTER_WEIGHTS else (OneDevice, Ddp)
    fit(job, alone(job) if job.backend == "none" else together(job))


@subject(name="torch", backends=["zero"], precisions=PRECISIONS, capabilities=CAPABILITIES, library="torch")
def train_zero(job):
    fit(job, Zero(job))


# On CPUs DataParallel would be a plain forward.
@subject(name="torch", backends=["dp"], precisions={"cuda": PRECISIONS}, capabilities=CAPABILITIES, library="torch")
def train_dp(job):
    fit(job, Dp(job))


class OneDevice:
    """The plain model: ``model`` trains, and ``bare`` evaluates."""

    def __init__(self, job):
        self.model = self.bare = job.model().to(job.device)
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        """Return the context for the forward and backward of a batch. ``last``: it is the last batch of its window."""
        return nullcontext()

    def grad_scaler(self, job):
        return job.grad_scaler()

    def backward(self, job, scaler, batch, window, last):
        """Compute the gradients of a batch, one of ``window`` batches of a step, and return its loss."""
        with self.backward_of(last):
            with job.autocast():
                loss = job.loss(self.model(batch), batch)
            scaler.scale(loss / window).backward()
        return float(loss)

    def before_step(self):
        """Complete the gradients after the last backward of a window."""

    def clip(self, max_norm):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def after_step(self):
        """Complete the weights after the optimizers have stepped."""

    def val_share(self, job):
        """Return the validation samples of this rank. Shares can be unequal, because ``bare`` is not wrapped in DDP."""
        return range(job.data_rank, len(job.val_dataset), job.data_ranks)

    def save(self, file, others):
        """Write the full states of model and optimizers, and ``others``, on rank 0. Every rank must call this."""
        states = self.states()
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            torch.save({**states, **others}, file)

    def load(self, file, others):
        """Restore model and optimizers on every rank, and return the saved ``others``."""
        saved = torch.load(file, map_location=next(self.bare.parameters()).device, weights_only=True)
        self.bare.load_state_dict(saved["model"])
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(saved[f"optimizer {number}"])
        return {name: saved[name] for name in others}

    def states(self):
        every = {f"optimizer {number}": part.state_dict() for number, part in enumerate(self.optimizers)}
        return {"model": self.bare.state_dict(), **every}


class Dp(OneDevice):
    """DataParallel, which splits each batch over the devices and gathers the outputs on the first."""

    def __init__(self, job):
        super().__init__(job)
        self.model = DataParallel(self.bare, job.devices)


class Ddp(OneDevice):
    """DistributedDataParallel, which averages gradients over the ranks during the last backward of a window."""

    def __init__(self, job):
        torch.distributed.init_process_group(job.comm)
        self.bare = job.model().to(job.device)
        self.model = DistributedDataParallel(self.bare, job.device_ids, find_unused_parameters=job.unused_parameters)
        self.optimizers = job.optimizers(self.model.parameters())

    def backward_of(self, last):
        return nullcontext() if last else self.model.no_sync()


class WithMasterWeights:
    """Float32 copies of the model's bfloat16 weights. Optimizers step the copies, which then update the weights."""

    def __init__(self, job):
        super().__init__(job)
        weights = list(self.bare.parameters())
        self.masters = [torch.nn.Parameter(one.detach().float(), one.requires_grad) for one in weights]
        self.pairs = list(zip(weights, self.masters, strict=True))
        self.optimizers = job.optimizers(self.masters)

    def before_step(self):
        for weight, master in self.pairs:
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    def clip(self, max_norm):
        torch.nn.utils.clip_grad_norm_(self.masters, max_norm)

    @torch.no_grad()
    def after_step(self):
        for weight, master in self.pairs:
            weight.copy_(master)

    def states(self):
        return {**super().states(), "masters": [master.detach() for master in self.masters]}

    @torch.no_grad()
    def load(self, file, others):
        *saved, masters = super().load(file, {**others, "masters": None}).items()
        for master, value in zip(self.masters, masters[1], strict=True):
            master.copy_(value)
        return dict(saved)


class MasteredDevice(WithMasterWeights, OneDevice):
    """The plain model, with master weights."""


class MasteredDdp(WithMasterWeights, Ddp):
    """DistributedDataParallel, with master weights. Gradients are averaged in bfloat16 before they are converted."""


class Zero(Ddp):
    """ZeroRedundancyOptimizer, which shards the optimizer's state and broadcasts the updated weights."""

    def __init__(self, job):
        super().__init__(job)
        self.optimizers = [sharded(optimizer) for optimizer in self.optimizers]

    def states(self):
        for optimizer in self.optimizers:
            optimizer.consolidate_state_dict(to=0)
        return super().states() if torch.distributed.get_rank() == 0 else {}


def sharded(optimizer):
    """Return a ZeroRedundancyOptimizer with the parameter groups of ``optimizer``, which must not have stepped yet."""
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **options)


def fit(job, trainer):
    optimizers = trainer.optimizers
    sampler = DistributedSampler(job.dataset, job.data_ranks, job.data_rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    val_loader = DataLoader(job.val_dataset, batch_size=job.batch_size, sampler=trainer.val_share(job))
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    scaler = trainer.grad_scaler(job)
    parts = {"scaler": scaler, **{f"scheduler {number}": part for number, part in enumerate(schedulers)}}
    begun = load(job, trainer, parts) if job.resume else BEGINNING
    steps = begun["steps"]
    for epoch in range(begun["epoch"], job.epochs):
        sampler.set_epoch(epoch)
        total, count = 0.0, 0
        for number, batch, window, last in windows(loader, job.accumulate):
            if epoch == begun["epoch"] and number * job.global_batch_size < begun["samples"]:
                continue  # trained before the interruption
            batch = {name: column.to(job.device) for name, column in batch.items()}
            loss = trainer.backward(job, scaler, batch, window, last)
            if loss is not None:
                total, count = total + loss * len(batch["index"]), count + len(batch["index"])
            if last:
                trainer.before_step()
                if job.clip_norm is not None:
                    for optimizer in optimizers:
                        scaler.unscale_(optimizer)
                    trainer.clip(job.clip_norm)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                trainer.after_step()
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
        if count:  # not if training was interrupted at the end of the epoch
            job.log("loss", mean_over_ranks(job, total, count))


def scale_gradients(parameters, norm, max_norm):
    """Scale gradients whose norm is ``norm`` to at most ``max_norm``, as ``clip_grad_norm_`` does."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= min(1.0, max_norm / (float(norm) + 1e-6))


def mean_over_ranks(job, total, count):
    """Return the mean over the samples of all ranks. This rank has ``count`` samples, whose sum is ``total``."""
    sums = torch.tensor([total, count], dtype=torch.float64, device=job.device)
    if job.world_size > 1:
        torch.distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def save(job, trainer, parts, progress):
    # Progress is counted in samples over all ranks, because another number of ranks can resume the training.
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
