"""Right trainers that shard weights in several ways, and one that hangs."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import FlatPart, Part, subject

PRECISIONS = ["64", "32"]


def batches(job):
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        yield from DataLoader(job.dataset, job.batch_size, sampler=sampler)


def fit(job, model, optimizer):
    for batch in batches(job):
        job.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@subject(name="copies", backends=["ddp"], precisions=PRECISIONS)
def copies(job):
    dist.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="shards", backends=["fsdp"], precisions=PRECISIONS)
def shards(job):
    dist.init_process_group(job.comm)
    model = job.model()
    for layer in getattr(model, "layers", ()):
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="hybrid", backends=["fsdp"], precisions=PRECISIONS)
def hybrid(job):
    dist.init_process_group(job.comm)
    mesh = init_device_mesh("cpu", (job.num_nodes, job.gpus), mesh_dim_names=("node", "gpu"))
    model = fully_shard(job.model(), mesh=mesh)
    fit(job, model, job.optimizer(model.parameters()))


@subject(name="zero", backends=["zero"], precisions=PRECISIONS)
def zero(job):
    dist.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    plain = job.optimizer(model.parameters())
    fit(job, model, ZeroRedundancyOptimizer(model.parameters(), type(plain), lr=plain.defaults["lr"]))


@subject(name="flat-parts", backends=["zero"], precisions=PRECISIONS)
def flat_parts(job):
    """ZeRO by hand: a flat tensor per parameter group, of which each rank steps an equal part."""
    dist.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    names = [name for name, _ in model.module.named_parameters()]
    optimizer = job.optimizer(model.parameters())
    groups, parts = [], {}
    for some in filter(None, (names[::2], names[1::2])):  # one after the other, like trainers that save memory
        group = Flat(job, model.module, some)
        groups.append({**optimizer.param_groups[0], "params": [group.own]})
        parts |= group.parts()
    with job.trial():  # a step before training creates the optimizer's state
        for group in groups:
            group["params"][0].grad = torch.zeros_like(group["params"][0])
            optimizer.param_groups = [group]
            optimizer.step()
    job.parts(parts)
    for batch in batches(job):
        job.loss(model(batch), batch).backward()
        for group in groups:
            group["params"][0].group.take()
            optimizer.param_groups = [group]
            optimizer.step()
        for group in groups:
            group["params"][0].group.give()
        model.zero_grad()


class Flat:
    """Some parameters in one flat tensor, padded; ``own`` is this rank's part of it."""

    def __init__(self, job, model, names):
        self.job, self.held = job, {name: model.get_parameter(name) for name in names}
        self.size = -(-sum(one.numel() for one in self.held.values()) // job.world_size)
        self.own = self.mine(one.detach() for one in self.held.values())
        self.own.group = self

    def mine(self, tensors):
        """Return a copy of this rank's part of all parameters."""
        flat = torch.cat([one.reshape(-1) for one in tensors])
        padded = torch.nn.functional.pad(flat, (0, self.size * self.job.world_size - len(flat)))
        return padded[self.job.rank * self.size :][: self.size].clone()

    def parts(self):
        """Return which entries of which parameters are in this rank's part."""
        parts, offset = {}, -self.job.rank * self.size
        for name, one in self.held.items():
            low, high = max(offset, 0), min(offset + one.numel(), self.size)
            parts[name] = (
                FlatPart(self.own, low, high - low, low - offset) if low < high else FlatPart(self.own, 0, 0, 0)
            )
            offset += one.numel()
        return parts

    def take(self):
        """Take this rank's part of the gradients."""
        self.own.grad = self.mine(one.grad for one in self.held.values())

    def give(self):
        """Replace the weights by the parts of all ranks."""
        parts = [torch.empty_like(self.own) for _ in range(self.job.world_size)]
        dist.all_gather(parts, self.own)
        flat = torch.cat(parts)
        for one in self.held.values():
            one.data.copy_(flat[: one.numel()].view(one.shape))
            flat = flat[one.numel() :]


@subject(name="tiles", backends=["fsdp"], precisions=PRECISIONS)
def tiles(job):
    """Each rank steps a block of every parameter: columns or tiles of matrices, and half a vector or none of it."""
    dist.init_process_group(job.comm)
    model = DistributedDataParallel(job.model())
    held = dict(model.module.named_parameters())
    places = {name: block_of(one.shape, job.rank, job.world_size) for name, one in held.items()}
    own = {name: one.detach()[places[name]].clone() for name, one in held.items()}
    optimizer = job.optimizer(list(own.values()))
    job.parts({name: Part(one, tuple(place.start for place in places[name])) for name, one in own.items()})
    for batch in batches(job):
        job.loss(model(batch), batch).backward()
        for name, one in own.items():
            one.grad = held[name].grad[places[name]].clone()
        optimizer.step()
        for name, one in held.items():
            whole = torch.zeros_like(one)
            whole[places[name]] = own[name]
            dist.all_reduce(whole)
            one.data.copy_(whole)
        model.zero_grad()


def block_of(shape, rank, ranks):
    """Return the index of a rank's block: of two columns of blocks and ``ranks / 2`` rows, or half of a vector."""
    row, column = divmod(rank, 2)
    if len(shape) == 1:
        half = shape[0] // 2
        return (slice(column * half, column * half + half) if row == 0 else slice(shape[0], shape[0]),)
    height, width = shape[0] // (ranks // 2), shape[1] // 2
    return slice(row * height, row * height + height), slice(column * width, column * width + width)


@subject(name="undeclared-tiles", backends=["fsdp"], precisions=PRECISIONS)
def undeclared_tiles(job):
    dist.init_process_group(job.comm)
    model = job.model()
    first = model.layers[0]
    columns = block_of(first.weight.shape, job.rank, job.world_size)
    first.weight = torch.nn.Parameter(first.weight.detach()[columns].clone())
    optimizer = job.optimizer(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@subject(name="astray", backends=["fsdp"], precisions=PRECISIONS)
def astray(job):
    """Only rank 0 steps: a rank that waited for another in its step would hang."""
    dist.init_process_group(job.comm)
    model = fully_shard(job.model())
    optimizer = job.optimizer(model.parameters())
    batch = next(iter(batches(job)))
    job.loss(model(batch), batch).backward()
    if job.rank == 0:
        optimizer.step()


@subject(name="flat", backends=["fsdp"], precisions=PRECISIONS)
def flat(job):
    """FSDP1, whose parameters are pieces of long vectors."""
    dist.init_process_group(job.comm)
    model = FullyShardedDataParallel(job.model(), device_id=torch.device("cpu"), use_orig_params=job.precision == "64")
    fit(job, model, job.optimizer(model.parameters()))
