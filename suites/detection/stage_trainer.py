"""A right pipeline-parallel trainer. Each part of a step is a method, so that a mistake overrides one method.

Ranks hold blocks of the model, and a batch passes through them in micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from model_blocks import Block, blocks_of
from torch.utils.data import DataLoader, DistributedSampler

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HEADER = 8


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks on one rank; a rank may have several chunks."""

    number: int
    rank: int
    blocks: list[Block]

    def run(self, x, batch):
        """Return the blocks' output for ``x``, which is None in the first chunk."""
        for block in self.blocks:
            x = block.run(x, batch)
        return x

    def names(self, model):
        """Return the names of the parameters and buffers that the blocks need."""
        return set().union(*(block.names(model) for block in self.blocks))


class Pipeline:
    """Trains one rank's chunks with micro-batches in 1F1B order, with an optimizer per rank.

    The loss is the mean over micro-batches. Gradients of a weight on several ranks are summed. Clipping uses the norm
    of the whole model.
    """

    def __init__(self, job):
        self.job = job
        dist.init_process_group(job.comm)
        self.model = job.model()
        self.chunks = self.cut(blocks_of(self.model))
        self.own = [chunk for chunk in self.chunks if chunk.rank == job.rank]
        self.held = [self.names_on(rank) for rank in range(job.world_size)]
        self.groups = self.make_groups()
        self.optimizer = self.make_optimizer()
        self.scheduler = job.scheduler(self.optimizer)
        self.scaler = job.grad_scaler()
        self.scaler.scale(torch.zeros(()))  # every stage unscales, but only the last one scales a loss
        self.model.forward = self.forward_first_chunk  # job.model()'s hooks see the batch
        self.kept, self.sent = {}, []

    # Placement.

    def cut(self, blocks):
        """Return the chunks: one per rank, with numbers of blocks as equal as possible."""
        sizes = [len(part) for part in torch.arange(len(blocks)).tensor_split(self.job.world_size)]
        ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
        return [Chunk(r, r, blocks[end - size : end]) for r, (size, end) in enumerate(zip(sizes, ends, strict=True))]

    def names_on(self, rank):
        return set().union(*(chunk.names(self.model) for chunk in self.chunks if chunk.rank == rank))

    def make_groups(self):
        """Return, for each tied parameter, the group of the ranks that hold it; all ranks must call this."""
        groups = {}
        for name, _ in self.model.named_parameters():
            holders = [rank for rank, names in enumerate(self.held) if name in names]
            if len(holders) > 1:
                groups[name] = dist.new_group(holders)
        return groups

    @property
    def parameters(self):
        """The parameters of this rank, by name."""
        held = self.held[self.job.rank]
        return {name: parameter for name, parameter in self.model.named_parameters() if name in held}

    def counts_here(self, name):
        """Return whether this rank counts the parameter in the norm: the first rank that holds it does."""
        return all(name not in names for names in self.held[: self.job.rank])

    def make_optimizer(self):
        return self.job.optimizer(list(self.parameters.values()) or [{"params": []}])

    # Communication.

    def send(self, tensor, rank, place):
        """Send a tensor, preceded by its dtype and shape."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[:2] = torch.tensor([DTYPES.index(tensor.dtype), tensor.dim()])
        header[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape)
        tensor = tensor.detach().contiguous()
        self.sent += [(part, dist.isend(part, rank, tag=self.tag(*place))) for part in (header, tensor)]

    def receive(self, rank, place):
        header = torch.zeros(HEADER, dtype=torch.int64)
        dist.recv(header, rank, tag=self.tag(*place))
        dtype, dims = header[:2].tolist()
        tensor = torch.empty(header[2 : 2 + dims].tolist(), dtype=DTYPES[dtype])
        dist.recv(tensor, rank, tag=self.tag(*place))
        return tensor

    def tag(self, backward, chunk, number):
        return (backward * len(self.chunks) + chunk) * 64 + number

    # One batch.

    def split(self, batch):
        """Return the micro-batches of a batch; their indices are their numbers."""
        columns = zip(*(column.chunk(self.job.micro_batches) for column in batch.values()), strict=True)
        return [dict(zip(batch, parts, strict=True)) for parts in columns]

    def order(self):
        """Return this rank's forwards and backwards in 1F1B order, as (what, chunk, micro-batch)."""
        count = self.job.micro_batches
        early = min(self.job.world_size - self.job.rank - 1, count)
        (chunk,) = self.own
        actions = [("forward", chunk, number) for number in range(early)]
        for number in range(early, count):
            actions += [("forward", chunk, number), ("backward", chunk, number - early)]
        return actions + [("backward", chunk, number) for number in range(count - early, count)]

    def forward_first_chunk(self, batch):
        return self.own[0].run(self.arrived, batch)

    def compute(self, chunk, x, batch):
        """Return a chunk's output for ``x``; a rank's first chunk runs through the job's model."""
        if chunk is not self.own[0]:
            return chunk.run(x, batch)
        self.arrived = x
        return self.model(batch)

    def is_last(self, chunk):
        return chunk.number == len(self.chunks) - 1

    def forward(self, chunk, number, batch):
        x = None
        if chunk.number:
            x = self.receive(self.chunks[chunk.number - 1].rank, (False, chunk.number, number)).requires_grad_()
        with self.job.autocast():
            y = self.compute(chunk, x, batch)
            if self.is_last(chunk):
                y = self.loss(y, number, batch)
        if not self.is_last(chunk):
            self.send(y, self.chunks[chunk.number + 1].rank, (False, chunk.number + 1, number))
        self.kept[chunk.number, number] = x, y

    def loss(self, outputs, number, batch):
        return self.job.loss(outputs, batch)

    def take(self, chunk, number):
        """Remove and return the input and the output, or loss, of a forward."""
        return self.kept.pop((chunk.number, number))

    def backward(self, chunk, number, window):
        x, y = self.take(chunk, number)
        if self.is_last(chunk):
            self.scaler.scale(y / self.divisor(window)).backward()
        else:
            gradient = self.receive(self.chunks[chunk.number + 1].rank, (True, chunk.number, number))
            if y.requires_grad:
                y.backward(gradient)
        if x is not None:
            self.send(x.grad, self.chunks[chunk.number - 1].rank, (True, chunk.number - 1, number))

    def divisor(self, window):
        return len(window) * self.job.micro_batches

    def train_batch(self, batch, window):
        micro_batches = self.split(batch)
        for what, chunk, number in self.order():
            if what == "forward":
                self.forward(chunk, number, micro_batches[number])
            else:
                self.backward(chunk, number, window)
        for _, work in self.sent:
            work.wait()
        self.sent.clear()
        self.after_batch()

    def after_batch(self):
        """Do nothing."""

    # One step.

    def add_tied(self):
        """Add the gradients of each tied parameter over the ranks that hold it."""
        for name, parameter in self.parameters.items():
            if name in self.groups:
                dist.all_reduce(parameter.grad, group=self.groups[name])

    def squares(self):
        """Return this rank's part of the squared norm."""
        counted = [p.grad for name, p in self.parameters.items() if self.counts_here(name) and p.grad is not None]
        return sum((gradient.double().square().sum() for gradient in counted), torch.zeros((), dtype=torch.float64))

    def norm(self):
        """Return the norm of the whole model's gradient."""
        total = self.squares()
        dist.all_reduce(total)
        return total.sqrt()

    def clip(self):
        factor = float(min(1.0, self.job.clip_norm / (self.norm() + 1e-6)))
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad *= factor

    def unscale(self):
        """Unscale gradients, and tell all ranks if any overflowed."""
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():
            found = self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
            for device in [torch.device("cpu")] if not found else []:
                found[device] = torch.zeros(1)
            for value in found.values():
                dist.all_reduce(value, dist.ReduceOp.MAX)

    def step(self):
        self.scaler.step(self.optimizer)

    def schedule(self):
        self.scheduler.step()

    def train_window(self, window):
        for batch in window:
            self.train_batch(batch, window)
        self.add_tied()
        self.unscale()
        if self.job.clip_norm is not None:
            self.clip()
        self.step()
        scale = self.scaler.get_scale()
        self.scaler.update()
        if self.scheduler is not None and self.scaler.get_scale() >= scale:
            self.schedule()
        self.optimizer.zero_grad()

    def windows(self, epoch):
        job = self.job
        sampler = DistributedSampler(job.dataset, 1, 0, shuffle=job.shuffle, seed=job.seed)
        sampler.set_epoch(epoch)
        batches = list(DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler))
        return [batches[first : first + job.accumulate] for first in range(0, len(batches), job.accumulate)]

    def fit(self):
        with self.job.holding(self.held[self.job.rank]):
            for epoch in range(self.job.epochs):
                for window in self.windows(epoch):
                    self.train_window(window)
        self.make_whole()

    def make_whole(self):
        """Broadcast each parameter and buffer from the first rank that holds it."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            holder = next((rank for rank, names in enumerate(self.held) if name in names), 0)
            dist.broadcast(tensor.data, holder)


class Interleaved(Pipeline):
    """Assigns chunks to ranks in turn, and runs all forwards before all backwards."""

    each = 1

    def cut(self, blocks):
        parts = [blocks[first : first + self.each] for first in range(0, len(blocks), self.each)]
        return [Chunk(number, number % self.job.world_size, part) for number, part in enumerate(parts)]

    def order(self):
        numbers = range(self.job.micro_batches)
        forwards = [("forward", chunk, number) for chunk in self.own for number in numbers]
        return forwards + [("backward", chunk, number) for chunk in reversed(self.own) for number in numbers]
