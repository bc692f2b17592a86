"""Training with torch.distributed.pipelining, as its tutorial does: the model is traced, and cut into stages.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html. What it leaves to its users is done here: the sum of
the gradients of tied weights, the norm over all stages, an infinity that all ranks learn of, and a mean over
micro-batches that holds under accumulation (``scale_grads`` divides what earlier batches of a window left by the
micro-batches again).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch.distributed
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import Pipe, PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from plumbline.subjects.declare import subject
from plumbline.subjects.handwritten import BEGINNING, PRECISIONS, load, save
from plumbline.subjects.torch_checkpoint import load_parts, save_parts

CAPABILITIES = ["accumulation", "clipping", "scheduler", "checkpoint", "frozen-parameters"]


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch's: its class, and how many stages a rank has.

    Stages go round the ranks, or, where they ``turn``, from the first rank to the last and back again.
    """

    make: type
    stages_per_rank: int = 1
    turn: bool = False

    def stages_of(self, rank, ranks):
        """Return the numbers of a rank's stages, in the order of the model."""
        if self.turn:
            return [rank, 2 * ranks - 1 - rank]
        return list(range(rank, self.stages_per_rank * ranks, ranks))


@subject(name="torch", backends=["pp"], precisions=PRECISIONS, capabilities=CAPABILITIES, library="torch")
def train(job):
    train_with(Schedule(Schedule1F1B), job)


def train_with(schedule, job):
    torch.distributed.init_process_group(job.comm)
    stages = Stages(job, schedule)
    with job.holding(stages.held):
        fit(job, stages)
    stages.gather()


class Stages:
    """The part of the model that this rank holds."""

    def __init__(self, job, schedule):
        self.job = job
        self.model = job.model().to(job.device)
        numbers = [schedule.stages_of(rank, job.world_size) for rank in range(job.world_size)]
        # What is traced is no training. Stages receive what it had: autocast makes activations narrower.
        with job.trial(), torch.random.fork_rng(devices=[]), job.autocast():
            example = self.micro_batch()
            self.columns = columns_used(self.model, example)
            inputs = tuple(example[name] for name in self.columns)
            model = OfColumns(self.model, self.columns)
            pipe = pipeline(model, inputs, split_spec=cuts(self.model, schedule.stages_per_rank * job.world_size))
        modules = [[tie(pipe.get_stage_module(number), self.model) for number in own] for own in numbers]
        self.parameters = list(dict.fromkeys(chain(*(module.parameters() for module in modules[job.rank]))))
        self.optimizers = job.optimizers(self.parameters) if self.parameters else []
        self.held, self.holder_of, self.shared = set(), {}, {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            holders = [rank for rank, own in enumerate(modules) if any(holds(module, tensor) for module in own)]
            self.held |= {name} if job.rank in holders else set()
            self.holder_of[name] = min(holders, default=0)
            if len(holders) > 1 and isinstance(tensor, nn.Parameter):
                self.shared[tensor] = min(holders), torch.distributed.new_group(holders)
        # Of stages that build_stage makes, those of one rank that follow each other are warmed up by messages from the
        # rank to itself, and gloo raises (suites/expectations/reproductions/torch_pipeline_in_a_v.py).
        built = built_by_hand if schedule.turn else Pipe.build_stage
        stages = [built(pipe, number, job.device) for number in numbers[job.rank]]
        self.has_first, self.has_last = stages[0].is_first, stages[-1].is_last
        for stage in stages:
            stage.submod.forward = self.recorded(stage.submod.forward, stage is stages[0])
        own = stages if schedule.stages_per_rank > 1 else stages[0]
        self.schedule = schedule.make(own, job.micro_batches, loss_fn=self.loss, scale_grads=False)
        self.scaler = ShardedGradScaler(job.device.type, enabled=job.grad_scaler().is_enabled())
        self.scaler.scale(torch.zeros((), device=job.device))  # the last stage alone scales a loss, and all unscale

    def gather(self):
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            torch.distributed.broadcast(tensor.data, self.holder_of[name])

    def micro_batch(self):
        """Return the first micro-batch of the dataset, for the shapes of what travels."""
        rows = range(self.job.batch_size // self.job.micro_batches)
        batch = next(iter(DataLoader(self.job.dataset, batch_size=len(rows), sampler=rows)))
        return {name: column.to(self.job.device) for name, column in batch.items()}

    def recorded(self, forward, first):
        """Return a stage's forward; that of the rank's first stage is a call of the job's model, which records it."""

        def computed(*args, **kwargs):
            with self.job.autocast():
                if not first:
                    return forward(*args, **kwargs)
                self.model.forward = lambda batch: forward(*args, **kwargs)
                return self.model(next(self.begun))

        return computed

    def loss(self, outputs, index):
        """Return a micro-batch's part of the mean over the window."""
        with self.job.autocast():
            loss = self.job.loss(outputs, self.batch_of(index))
        return self.scaler.scale(loss / self.job.micro_batches / self.window)

    def batch_of(self, index):
        return next(batch for batch in self.batches if torch.equal(batch["index"], index))

    def step(self, batch, window):
        """Compute the gradients of a batch, one of ``window`` that count for a step."""
        parts = zip(*(column.tensor_split(self.job.micro_batches) for column in batch.values()), strict=True)
        self.batches = [dict(zip(batch, columns, strict=True)) for columns in parts]
        self.window, self.begun = window, iter(self.batches)
        inputs = [batch[name] for name in self.columns] if self.has_first else []
        self.schedule.step(*inputs, target=batch["index"] if self.has_last else None)

    def complete(self):
        for parameter, (_, group) in self.shared.items():
            if any(parameter is one for one in self.parameters):
                torch.distributed.all_reduce(parameter.grad, group=group)

    def clip(self, max_norm):
        square = torch.zeros((), dtype=torch.float64, device=self.job.device)
        for parameter in self.parameters:
            counts_here = self.shared.get(parameter, (self.job.rank,))[0] == self.job.rank
            if parameter.grad is not None and counts_here:
                square += parameter.grad.double().square().sum()
        torch.distributed.all_reduce(square)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad *= min(1.0, max_norm / (float(square.sqrt()) + 1e-6))

    def save(self, file, others):
        """Write what this rank's stages hold, and of ``others``, which all ranks have, one rank each."""
        save_parts(self.model, self.optimizers, file, others, self.held)

    def load(self, file, others):
        return load_parts(self.model, self.optimizers, file, others, self.held)


class OfColumns(nn.Module):
    """The model as one that takes the columns of a batch, of which tracing asks that each is used."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *columns):
        return self.model(dict(zip(self.names, columns, strict=True)))


def columns_used(model, batch):
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


def built_by_hand(pipe, number, device):
    """Return a stage of what was traced; told what it receives and returns, torch does not run it to find out."""
    graph = pipe.get_stage_module(number).graph
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    outputs = [node.meta["val"] for node in tree_leaves(graph.output_node().args)]
    inputs, outputs = (
        tuple(torch.empty_like(one, device="meta", requires_grad=one.is_floating_point()) for one in several)
        for several in (inputs, outputs)
    )
    return PipelineStage(pipe.get_stage_module(number), number, pipe.num_stages, device, inputs, outputs)


def tie(module, model):
    """Give a stage the model's own parameters, of which tracing copies those that are tied; return it."""
    for name, _ in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, model.get_parameter(name.removeprefix("model.")))
    return module


def holds(module, tensor):
    return any(tensor is one for one in (*module.parameters(), *module.buffers()))


def without_parameters(job):
    """Return the job's optimizers for a stage that has none: all ranks take part when the scaler looks for infinities.

    Their schedules are those of the other ranks, as a checkpoint has the state of any rank's.
    """
    optimizers = job.optimizers([nn.Parameter(torch.zeros(0))])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = []
    return optimizers


def fit(job, stages):
    """Train the stages with a loop like that of one device."""
    optimizers = stages.optimizers or without_parameters(job)
    sampler = DistributedSampler(job.dataset, job.data_ranks, job.data_rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    schedulers = [scheduler for scheduler in map(job.scheduler, optimizers) if scheduler is not None]
    scaler = stages.scaler
    parts = {"scaler": scaler, **{f"scheduler {number}": part for number, part in enumerate(schedulers)}}
    begun = load(job, stages, parts) if job.resume else BEGINNING
    steps = begun["steps"]
    for epoch in range(begun["epoch"], job.epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if epoch == begun["epoch"] and number * job.global_batch_size < begun["samples"]:
                continue  # trained on before the interruption
            place = number % job.accumulate
            window = min(job.accumulate, len(loader) - (number - place))  # the last one may be shorter
            stages.step({name: column.to(job.device) for name, column in batch.items()}, window)
            if place < window - 1:
                continue
            stages.complete()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if job.clip_norm is not None:
                stages.clip(job.clip_norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            for scheduler in schedulers if scaler.get_scale() >= scale else ():
                scheduler.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            steps += 1
            if steps == job.stop_after_step:
                samples = (number + 1) * job.global_batch_size
                save(job, stages, parts, {"epoch": epoch, "samples": samples, "steps": steps})
                return
