"""Training with torch.distributed.pipelining: the model is traced and split into stages.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html. torch leaves some tasks to its users, which this file
does: it sums the gradients of tied weights, computes the norm over all stages, tells all ranks about infinities, and
averages over micro-batches. ``scale_grads`` does not support accumulation: it would divide the gradients of a window's
earlier batches again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch.distributed
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import Pipe, PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import PRECISIONS, OneDevice, fit, scale_gradients
from plumbline.subjects.torch_fsdp import load_parts, save_parts

CAPABILITIES = ["accumulation", "clipping", "scheduler", "checkpoint", "frozen-parameters"]


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch: its class, and the number of stages per rank.

    Stages are assigned to ranks in a loop or, with ``turn``, in a V: from the first rank to the last and back.
    """

    make: type
    stages_per_rank: int = 1
    turn: bool = False

    def stages_of(self, rank, ranks):
        if self.turn:
            return [rank, 2 * ranks - 1 - rank]
        return list(range(rank, self.stages_per_rank * ranks, ranks))


@subject(
    name="torch",
    backends=["pp"],
    precisions=PRECISIONS,
    capabilities=CAPABILITIES,
    library="torch",
    devices="own",
    batches="equal",  # https://github.com/pytorch/pytorch/issues/126600
)
def train(job):
    train_with(Schedule(Schedule1F1B), job)


def train_with(schedule, job):
    torch.distributed.init_process_group(job.comm)
    stages = Stages(job, schedule)
    with job.holding(stages.held):
        stages.optimizers = stages.own_optimizers or without_parameters(job)
        fit(job, stages)
    stages.gather()


class Stages(OneDevice):
    """The stages of the model that this rank holds."""

    def __init__(self, job, schedule):
        self.job = job
        self.model = job.model().to(job.device)
        numbers = [schedule.stages_of(rank, job.world_size) for rank in range(job.world_size)]
        # Tracing is not training, so it is a trial. It needs autocast, because stages expect the traced dtypes.
        with job.trial(), torch.random.fork_rng(devices=[]), job.autocast():
            example = self.micro_batch()
            self.columns = columns_used(self.model, example)
            inputs = tuple(example[name] for name in self.columns)
            model = OfColumns(self.model, self.columns)
            pipe = pipeline(model, inputs, split_spec=cuts(self.model, schedule.stages_per_rank * job.world_size))
        modules = [[tie(pipe.get_stage_module(number), self.model) for number in own] for own in numbers]
        self.parameters = list(dict.fromkeys(chain(*(module.parameters() for module in modules[job.rank]))))
        self.own_optimizers = job.optimizers(self.parameters) if self.parameters else []
        self.held, self.holder_of, self.shared = set(), {}, {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            holders = [rank for rank, own in enumerate(modules) if any(holds(module, tensor) for module in own)]
            self.held |= {name} if job.rank in holders else set()
            self.holder_of[name] = min(holders, default=0)
            if len(holders) > 1 and isinstance(tensor, nn.Parameter):
                self.shared[tensor] = min(holders), torch.distributed.new_group(holders)
        # If a rank has consecutive stages, build_stage warms them up with messages to the same rank, and gloo raises
        # (suites/expectations/reproductions/torch_pipeline_in_a_v.py).
        built = built_by_hand if schedule.turn else Pipe.build_stage
        stages = [built(pipe, number, job.device) for number in numbers[job.rank]]
        self.has_first, self.has_last = stages[0].is_first, stages[-1].is_last
        for stage in stages:
            stage.submod.forward = self.recorded(stage.submod.forward, stage is stages[0])
        own = stages if schedule.stages_per_rank > 1 else stages[0]
        self.schedule = schedule.make(own, job.micro_batches, loss_fn=self.loss, scale_grads=False)
        self.scaler = ShardedGradScaler(job.device.type, enabled=job.grad_scaler().is_enabled())
        self.scaler.scale(
            torch.zeros((), device=job.device)
        )  # creates the scale: only the last stage scales a loss, but all stages unscale gradients

    def gather(self):
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            torch.distributed.broadcast(tensor.data, self.holder_of[name])

    def micro_batch(self):
        """Return the first micro-batch of the dataset. All micro-batches have its shapes."""
        rows = range(self.job.batch_size // self.job.micro_batches)
        batch = next(iter(DataLoader(self.job.dataset, batch_size=len(rows), sampler=rows)))
        return {name: column.to(self.job.device) for name, column in batch.items()}

    def recorded(self, forward, first):
        """Return a stage's forward. The rank's first stage calls it through the job's model, which is recorded."""

        def computed(*args, **kwargs):
            with self.job.autocast():
                if not first:
                    return forward(*args, **kwargs)
                self.model.forward = lambda batch: forward(*args, **kwargs)
                return self.model(next(self.begun))

        return computed

    def loss(self, outputs, index):
        """Return the scaled share of a micro-batch in the mean loss over the window."""
        with self.job.autocast():
            loss = self.job.loss(outputs, self.batch_of(index))
        return self.scaler.scale(loss / self.job.micro_batches / self.window)

    def batch_of(self, index):
        return next(batch for batch in self.batches if torch.equal(batch["index"], index))

    def grad_scaler(self, job):
        return self.scaler

    def backward(self, job, scaler, batch, window, last):
        parts = zip(*(column.tensor_split(self.job.micro_batches) for column in batch.values()), strict=True)
        self.batches = [dict(zip(batch, columns, strict=True)) for columns in parts]
        self.window, self.begun = window, iter(self.batches)
        inputs = [batch[name] for name in self.columns] if self.has_first else []
        self.schedule.step(*inputs, target=batch["index"] if self.has_last else None)

    def before_step(self):
        # Tied weights have gradients on several stages.
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
        scale_gradients(self.parameters, square.sqrt(), max_norm)

    def save(self, file, others):
        save_parts(self.model, self.own_optimizers, file, others, self.held)

    def load(self, file, others):
        return load_parts(self.model, self.own_optimizers, file, others, self.held)


class OfColumns(nn.Module):
    """The model as a module that takes the columns of a batch. For tracing, it must use all of them."""

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

    model.eval()(Reading(batch))  # training mode would update statistics
    model.train()
    return list(dict.fromkeys(used))


def cuts(model, stages):
    """Return where to split the model into stages whose numbers of layers differ by at most one.

    If the model has fewer layers than stages, the layers within its child modules are counted.
    """
    layers = [name for name, _ in model.named_children()]
    if len(layers) < stages:
        inner = [[f"{name}.{own}" for own, _ in layer.named_children()] for name, layer in model.named_children()]
        layers = [own for name, names in zip(layers, inner, strict=True) for own in names or [name]]
    firsts = [part[0] for part in torch.arange(len(layers)).tensor_split(stages)[1:]]
    return {f"model.{layers[first]}": SplitPoint.BEGINNING for first in firsts}


def built_by_hand(pipe, number, device):
    """Return a stage with given input and output shapes, so that torch does not run it to infer them."""
    graph = pipe.get_stage_module(number).graph
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    outputs = [node.meta["val"] for node in tree_leaves(graph.output_node().args)]
    inputs, outputs = (
        tuple(torch.empty_like(one, device="meta", requires_grad=one.is_floating_point()) for one in several)
        for several in (inputs, outputs)
    )
    return PipelineStage(pipe.get_stage_module(number), number, pipe.num_stages, device, inputs, outputs)


def tie(module, model):
    """Replace a stage's parameters with the model's, because tracing copies tied ones, and return the stage."""
    for name, _ in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, model.get_parameter(name.removeprefix("model.")))
    return module


def holds(module, tensor):
    return any(tensor is one for one in (*module.parameters(), *module.buffers()))


def without_parameters(job):
    """Return the job's optimizers for a stage without parameters.

    All ranks take part when the scaler checks for infinities, and a checkpoint can contain the schedules of any rank.
    """
    optimizers = job.optimizers([nn.Parameter(torch.zeros(0))])
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = []
    return optimizers
