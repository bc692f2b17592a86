"""Training with torch.distributed.pipelining, as its tutorial does: the model is traced, and cut into a stage a rank.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html. What it leaves to its users is done here: the sum of
the gradients of tied weights, the norm over all stages, and a mean over micro-batches that holds under accumulation
(``scale_grads`` divides what earlier batches of a window left by the micro-batches again).
"""

from __future__ import annotations

import torch.distributed
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.utils.data import DataLoader, DistributedSampler

from harness.subjects.declare import subject

CAPABILITIES = ["accumulation", "clipping", "scheduler", "frozen-parameters"]


@subject(
    name="torch",
    backends=["pp"],
    # A stage receives what it was traced with: activations that autocast makes narrower would be read as float32.
    precisions=["64", "32"],
    capabilities=CAPABILITIES,
    library="torch",
)
def train(job):
    """Train ``job`` with a stage of its model on each rank."""
    torch.distributed.init_process_group(job.comm)
    stage = Stage(job)
    with job.holding(stage.held):
        fit(job, stage)
    stage.gather()


class Stage:
    """The part of the model that this rank holds."""

    def __init__(self, job):
        self.job = job
        self.model = job.model().to(job.device)
        with job.trial(), torch.random.fork_rng(devices=[]):  # what is traced is no training
            example = self.micro_batch()
            self.columns = columns_used(self.model, example)
            inputs = {name: example[name] for name in self.columns}
            pipe = pipeline(OfColumns(self.model), (), inputs, split_spec=cuts(self.model, job.world_size))
        stages = [tie(pipe.get_stage_module(rank), self.model) for rank in range(job.world_size)]
        self.parameters = list(dict.fromkeys(stages[job.rank].parameters()))
        self.held, self.holder_of, self.shared = set(), {}, {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            holders = [rank for rank, stage in enumerate(stages) if holds(stage, tensor)]
            self.held |= {name} if job.rank in holders else set()
            self.holder_of[name] = min(holders, default=0)
            if len(holders) > 1 and isinstance(tensor, nn.Parameter):
                self.shared[tensor] = min(holders), torch.distributed.new_group(holders)
        stage = pipe.build_stage(job.rank, job.device)
        self.compute, stage.submod.forward = stage.submod.forward, self.forward
        self.model.forward = lambda batch: self.compute(*self.arguments[0], **self.arguments[1])
        self.schedule = Schedule1F1B(stage, job.micro_batches, loss_fn=self.loss, scale_grads=False)

    def gather(self):
        """Give the model on every rank the weights and buffers of all stages."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            torch.distributed.broadcast(tensor.data, self.holder_of[name])

    def micro_batch(self):
        """Return the first micro-batch of the dataset, for the shapes of what travels."""
        rows = range(self.job.batch_size // self.job.micro_batches)
        return next(iter(DataLoader(self.job.dataset, batch_size=len(rows), sampler=rows)))

    def forward(self, *args, **kwargs):
        """Return the stage's outputs for the next micro-batch, inside a call of the job's model, which records it."""
        self.arguments = args, kwargs
        with self.job.autocast():
            return self.model(next(self.begun))

    def loss(self, outputs, index):
        """Return a micro-batch's part of the mean over the window."""
        with self.job.autocast():
            return self.job.loss(outputs, self.batch_of(index)) / self.job.micro_batches / self.window

    def batch_of(self, index):
        """Return the micro-batch with these samples."""
        return next(batch for batch in self.batches if torch.equal(batch["index"], index))

    def step(self, batch, window):
        """Compute the gradients of a batch, one of ``window`` that count for a step."""
        parts = zip(*(column.tensor_split(self.job.micro_batches) for column in batch.values()), strict=True)
        self.batches = [dict(zip(batch, columns, strict=True)) for columns in parts]
        self.window, self.begun = window, iter(self.batches)
        inputs = {name: batch[name] for name in self.columns} if self.job.rank == 0 else {}
        self.schedule.step(**inputs, target=batch["index"] if self.job.rank == self.job.world_size - 1 else None)

    def complete(self, max_norm):
        """Add up the gradients of tied weights, and scale all to at most this norm, if there is one."""
        for parameter, (_, group) in self.shared.items():
            if any(parameter is one for one in self.parameters):
                torch.distributed.all_reduce(parameter.grad, group=group)
        if max_norm is None:
            return
        square = torch.zeros((), dtype=torch.float64, device=self.job.device)
        for parameter in self.parameters:
            counts_here = self.shared.get(parameter, (self.job.rank,))[0] == self.job.rank
            if parameter.grad is not None and counts_here:
                square += parameter.grad.double().square().sum()
        torch.distributed.all_reduce(square)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad *= min(1.0, max_norm / (float(square.sqrt()) + 1e-6))


class OfColumns(nn.Module):
    """The model as one that takes the columns of a batch, of which tracing asks that each is used."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **columns):
        """Return the model's outputs."""
        return self.model(columns)


def columns_used(model, batch):
    """Return the names of the columns that the model reads."""
    used = []

    class Reading(dict):
        def __getitem__(self, name):
            used.append(name)
            return super().__getitem__(name)

    model.eval()(Reading(batch))  # in training mode it would update statistics
    model.train()
    return list(dict.fromkeys(used))


def cuts(model, stages):
    """Return before which layers the model is cut into so many stages: equal numbers of layers, or one fewer.

    Layers are the model's own, and those of its Sequentials where it has fewer than stages.
    """
    layers = [name for name, _ in model.named_children()]
    if len(layers) < stages:
        inner = [[f"{name}.{own}" for own, _ in layer.named_children()] for name, layer in model.named_children()]
        layers = [own for name, names in zip(layers, inner, strict=True) for own in names or [name]]
    firsts = [part[0] for part in torch.arange(len(layers)).tensor_split(stages)[1:]]
    return {f"model.{layers[first]}": SplitPoint.BEGINNING for first in firsts}


def tie(module, model):
    """Give a stage the model's own parameters, of which tracing copies those that are tied; return it."""
    for name, _ in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, model.get_parameter(name.removeprefix("model.")))
    return module


def holds(module, tensor):
    """Say whether a parameter or buffer is one of the module's."""
    return any(tensor is one for one in (*module.parameters(), *module.buffers()))


def fit(job, stage):
    """Train the stage with a loop like that of one device."""
    optimizers = job.optimizers(stage.parameters) if stage.parameters else []
    sampler = DistributedSampler(job.dataset, job.data_ranks, job.data_rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            place = number % job.accumulate
            window = min(job.accumulate, len(loader) - (number - place))  # the last one may be shorter
            stage.step({name: column.to(job.device) for name, column in batch.items()}, window)
            if place == window - 1:
                stage.complete(job.clip_norm)
                for part in (*optimizers, *schedulers):
                    part.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
