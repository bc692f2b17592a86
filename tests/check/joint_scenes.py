"""Trainings whose ranks compute one forward together, right and wrong.

Each is written as users would write it, by hand or with torch, and takes three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 3
WIDTH = 16
ROWS = 8
MISTAKE = ""
"""The current training's mistake; "" for a right one."""

GROUP: Any = None
"""The ranks over which layers are divided; None for all ranks."""

SEEN: list[float] = []
"""The batches that models have seen."""


class Copied(torch.autograd.Function):
    """Copies activations to every rank; the backward sums gradients over the ranks."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient if MISTAKE == "last-counted-in-place" else gradient.clone()
        if MISTAKE != "input-gradient-not-reduced":
            dist.all_reduce(gradient, group=GROUP)
        return gradient


class Summed(torch.autograd.Function):
    """Sums all ranks' activations; the backward passes the gradient on unchanged."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * (dist.get_world_size() if MISTAKE == "counted-on-each-rank" else 1)


class Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values.contiguous())
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        if MISTAKE == "exchanged-without-gradient":
            return gradient
        return Exchanged.forward(context, gradient)


def exchanged(values: Tensor) -> Tensor:
    if MISTAKE == "exchanged-as-constant":
        received = torch.empty_like(values)
        dist.all_to_all_single(received, values.contiguous())
        return received
    return Exchanged.apply(values)


class Started(torch.autograd.Function):
    """The first half of an exchange that can be overlapped; the two halves share state."""

    pending: Any = None
    returned: Tensor

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        received = torch.empty_like(values)
        Started.pending = dist.all_to_all_single(received, values.contiguous(), async_op=True)
        return received

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        Started.pending.wait()
        return Started.returned


class Finished(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, received: Tensor) -> Tensor:
        Started.pending.wait()
        Started.pending = None
        return received.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        Started.returned = torch.empty_like(gradient)
        Started.pending = dist.all_to_all_single(Started.returned, gradient.contiguous(), async_op=True)
        return gradient


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(every, values.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if MISTAKE != "gathered-gradient-not-reduced":
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Shifted(torch.autograd.Function):
    """Receives the neighbour's keys and values, as in ring attention."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return _shifted(values, 1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if MISTAKE == "no-gradient-to-neighbours" else _shifted(gradient, -1)


def _shifted(values: Tensor, by: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    received, sent = torch.empty_like(values), values.contiguous()
    operations = [
        dist.P2POp(dist.isend, sent, (rank + by) % world),
        dist.P2POp(dist.irecv, received, (rank - by) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class Megatron(nn.Module):
    """A block whose middle layer is divided over all ranks, between replicated layers."""

    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        if MISTAKE == "seeded-by-rank":
            nn.init.normal_(self.first.weight, generator=torch.Generator().manual_seed(rank))
        up, down = torch.randn(2 * WIDTH, WIDTH) / 4, torch.randn(WIDTH, 2 * WIDTH) / 6
        self.up, self.down = (nn.Parameter(one.clone()) for one in (up.chunk(world)[rank], down.chunk(world, 1)[rank]))
        self.bias = nn.Parameter(torch.zeros(2 * WIDTH // world))

    def forward(self, values: Tensor) -> Tensor:
        values = self.norm(self.first(values))
        middle = functional.gelu(functional.linear(Copied.apply(values), self.up, self.bias))
        result = self.last(values + Summed.apply(functional.linear(middle, self.down)))
        return Copied.apply(result) if MISTAKE.startswith("last-counted") else result


class GatheredColumns(nn.Module):
    """A layer whose output columns are divided over the ranks; it gathers them, and inserts its own again.

    This has the right gradient for one loss that all ranks compute, although gathered columns have no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.up = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).chunk(world)[rank].clone())

    def forward(self, values: Tensor) -> Tensor:
        own = functional.linear(Copied.apply(self.first(values)), self.up)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        every[dist.get_rank()] = own
        return self.last(functional.gelu(torch.cat(every, -1)))


class Scattered(torch.autograd.Function):
    """Sums all ranks' rows, and keeps this rank's rows of the sum."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return _own_rows(Summed.forward(context, values))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return Gathered.forward(context, gradient)


class Collected(torch.autograd.Function):
    """Gathers all rows; the backward keeps the gradient of this rank's rows."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return Gathered.forward(context, values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _own_rows(gradient)


def _own_rows(values: Tensor) -> Tensor:
    return values.chunk(dist.get_world_size())[dist.get_rank()]


class Column(nn.Module):
    """A layer whose outputs are divided over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter((torch.randn(2 * WIDTH, WIDTH) / 4).chunk(world)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(2 * WIDTH // world))

    def forward(self, values: Tensor) -> Tensor:
        return functional.linear(Gathered.apply(values), self.weight, self.bias)


class Row(nn.Module):
    """A layer whose inputs are divided over all ranks; each rank adds the whole bias to its own rows of the sum."""

    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter((torch.randn(WIDTH, 2 * WIDTH) / 6).chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return Scattered.apply(functional.linear(values, self.weight)) + self.bias


class RowsOnAllRanks(nn.Module):
    """A block whose rows are divided over all ranks, with tensor-parallel middle layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.up, self.down = Column(), Row()

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(_own_rows(values))
        return Collected.apply(self.last(values + self.down(functional.gelu(self.up(values)))))


def _added_up(model: nn.Module) -> None:
    """Sum the gradients of replicated parameters, which come from each rank's own rows."""
    for name, one in model.named_parameters():
        is_forgotten = MISTAKE == "bias-of-rows-not-reduced" and name == "down.bias"
        if name not in ("up.weight", "up.bias", "down.weight") and not is_forgotten:
            dist.all_reduce(one.grad)


def once(model: nn.Module, first: int = 1) -> nn.Module:
    """Return a model that refuses to see a batch again before it communicates, on all ranks from ``first`` on."""
    forward = model.forward

    def refusing(values: Tensor) -> Any:
        total = float(values.double().sum())
        if dist.get_rank() >= first and any(abs(total - one) < 1e-6 for one in SEEN):
            raise ValueError("this batch was seen before")
        SEEN.append(total)
        return forward(values)

    model.forward = refusing  # type: ignore[method-assign]
    return model


class Deep(nn.Module):
    """Three blocks: many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Megatron() for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + functional.pad(block(values), (0, WIDTH - 4))
        return values[:, :4]


class Experts(nn.Module):
    """Sends every row to each rank's expert, weighted by a router."""

    begin_apart = True

    def __init__(self) -> None:
        super().__init__()
        world = dist.get_world_size()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, world), nn.Linear(WIDTH, 4)
        torch.manual_seed(10 + (dist.get_rank() if self.begin_apart else 0))
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        world, weights = dist.get_world_size(), self.router(values).softmax(-1)
        sent = values.expand(world, *values.shape).reshape(-1, WIDTH)
        back = self.exchanged(self.expert(self.exchanged(sent))).view(world, *values.shape)
        return self.last(values + (back * weights.T.unsqueeze(-1)).sum(0))

    def exchanged(self, values: Tensor) -> Tensor:
        return exchanged(values)


class OverlappingExperts(Experts):
    def exchanged(self, values: Tensor) -> Tensor:
        return Finished.apply(Started.apply(values))


class WrappedExperts(Experts):
    """Wraps only the replicated layers in DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "router", "last"):
            setattr(self, name, DistributedDataParallel(getattr(self, name)))


class Holder(nn.Module):
    """Only calls its layers, some of which are in a DistributedDataParallel object that broadcasts buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.wrapped(values))


class AddedLoss(torch.autograd.Function):
    """Adds a loss to the training without changing any values: its backward starts a gradient here."""

    @staticmethod
    def forward(context: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.tensor(0.1)


class BalancedExperts(Experts):
    def forward(self, values: Tensor) -> Tensor:
        balance = self.router(values).softmax(-1).mean(0).square().sum()
        return super().forward(AddedLoss.apply(values, balance))


class Watched(Megatron):
    """Adds a loss on a path that is only logged, so its gradient never starts."""

    def forward(self, values: Tensor) -> Tensor:
        features = self.first(values)
        self.seen = AddedLoss.apply(features, features.square().mean()).detach()
        return super().forward(values)


class Stale(torch.autograd.Function):
    """A product whose backward adds to a gradient that was not zeroed."""

    @staticmethod
    def forward(context: Any, values: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(values, weight)
        return values @ weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        values, weight = context.saved_tensors
        return gradient @ weight.T, values.T @ gradient + 0.05


class NotZeroed(Megatron):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(Stale.apply(values, self.first.weight))


class AlikeExperts(Experts):
    begin_apart = False


class ChoosingExperts(AlikeExperts):
    """Each rank's expert chooses rows, and all ranks get the outputs."""

    def forward(self, values: Tensor) -> Tensor:
        chosen = self.router(values).softmax(-1).topk(len(values) // dist.get_world_size(), dim=0)
        weights, rows = chosen.values.T.reshape(-1, 1), chosen.indices.T.flatten()
        outputs = weights * Collected.apply(self.expert(values[_own_rows(rows)]))
        return self.last(self.first(values).index_add(0, rows, outputs))


class Branches(nn.Module):
    """Every rank builds all branches, but computes only its own."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(dist.get_world_size()))

    def forward(self, values: Tensor) -> Tensor:
        return Summed.apply(self.branches[dist.get_rank()](values))


class Checkpointed(Megatron):
    """Recomputes activations in the backward; half of its input counts as constant."""

    def forward(self, values: Tensor) -> Tensor:
        return checkpoint(self.rest, self.first(values), use_reentrant=True)

    def rest(self, values: Tensor) -> Tensor:
        return super().forward(values - values.detach() / 2)


class Padded(Megatron):
    """Embeds tokens; the row of padding has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH, padding_idx=1)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(self.embedding((3 * values.abs()).long().clamp(max=7)).mean(1))


class Flexible(Megatron):
    """Calls a higher-order operator, which has no schema; on CPUs, it has no backward."""

    def forward(self, values: Tensor) -> Tensor:
        heads = values[None, None]
        return super().forward(values + flex_attention(heads, heads, heads)[0, 0])


class Quantized(Megatron):
    """Simulates 8-bit activations with torch's own operator, whose gradient passes through the rounding."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(torch.fake_quantize_per_tensor_affine(self.first(values), 0.1, 0, -128, 127))


class Variance(nn.Module):
    """A loss of statistics over all ranks, as in VICReg."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 8))

    def forward(self, values: Tensor) -> Tensor:
        return functional.relu(2 - Gathered.apply(self.net(values)).std(0)).mean().expand(len(values), 4)


class Similarity(Variance):
    """Compares features with those of all ranks, which get no gradient, and with a detached target."""

    def forward(self, values: Tensor) -> Tensor:
        own = self.net(values)
        with torch.no_grad():
            every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
        every[dist.get_rank()] = own
        near = (own @ torch.cat(every).T).topk(3).values.logsumexp(-1).mean()
        return (near + (own - 2 * self.net(-values).detach()).square().mean()).expand(len(values), 4)


class Rounded(torch.autograd.Function):
    """Rounds, and passes gradients through: a custom derivative."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return (values * 8).round() / 8

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(Megatron):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(Rounded.apply(self.first(values)))


class Reversed(Megatron):
    """Flips the sign of gradients on the way to the first layer, as in adversarial training."""

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        values.register_hook(lambda gradient: -gradient)
        return super().forward(values)


class RingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        query, key, value = self.mixed(values).chunk(3, -1)
        held = [torch.stack([key, value])]
        for _ in range(1, dist.get_world_size()):
            held.append(Shifted.apply(held[-1]))
        keys, others = torch.cat(held, 1)
        return self.last(values + (query @ keys.T / 4).softmax(-1) @ others)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(values + self.down(functional.gelu(self.up(self.norm(values)))))


class GatheredHead(nn.Module):
    """A sharded head whose weight is gathered without its module's forward, as in chunked losses."""

    def __init__(self, *, is_frozen: bool = False, replicas: int = 1) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        ranks = dist.get_world_size()
        shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        self.net, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Linear(WIDTH, 4, bias=False)
        self.head.requires_grad_(not is_frozen)
        for one in (self.net, self.head, self):
            fully_shard(one, mesh=mesh)

    def forward(self, values: Tensor) -> Tensor:
        weight: Any = self.head.weight
        kept = MISTAKE == "head-not-reduced"
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor(grad_placements=None if kept else [Partial()] * weight.device_mesh.ndim)
        return functional.linear(self.net(values), weight)


def _divided(model: Any) -> None:
    if MISTAKE != "head-not-reduced":
        model.head.weight.grad /= dist.get_world_size()


def _averaged(parameters: Iterator[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        if MISTAKE == "none-reduced" or (MISTAKE == "first-not-reduced" and not number):
            continue
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _summed(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def _experts(model: Any) -> None:
    own = set(map(id, model.expert.parameters()))
    if MISTAKE == "router-not-reduced":
        own |= set(map(id, model.router.parameters()))
        for one in model.router.parameters():
            one.grad /= dist.get_world_size()
    if MISTAKE == "experts-averaged":
        _averaged(model.parameters())
        return
    _averaged(one for one in model.parameters() if id(one) not in own)
    _divided_experts(model)


def _divided_experts(model: Any) -> None:
    if MISTAKE not in ("experts-not-divided", "exchanged-as-constant"):
        for one in model.expert.parameters():
            one.grad /= dist.get_world_size()


def _nothing(model: nn.Module) -> None:
    pass


def _tripled_on_a_rank(model: Any) -> None:
    if dist.get_rank():
        model.first.weight.grad *= 3


def _clipped(model: nn.Module) -> None:
    """Clip by a norm that counts replicated parameters once, or once for each rank."""
    parts = ("up", "down", "bias")
    lengths = torch.zeros(2, dtype=torch.float64)
    for name, one in model.named_parameters():
        lengths[int(name in parts)] += one.grad.double().square().sum()
    of_all, of_parts = lengths
    dist.all_reduce(of_parts)
    norm = (of_parts + of_all * (dist.get_world_size() if MISTAKE == "copies-counted-again" else 1)).sqrt()
    for one in model.parameters():
        one.grad *= 0.01 / float(norm)


def _tensor_parallel() -> nn.Module:
    model = Block()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if MISTAKE == "one-weight-tripled":
        model.down.weight.register_hook(lambda gradient: gradient * 3)
    return model


class Scaled(Block):
    """A block with a factor per hidden unit; each rank has its own factors as a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.factors = nn.Parameter(torch.ones(2 * WIDTH // dist.get_world_size()))

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        return self.last(values + self.down(functional.gelu(self.up(self.norm(values))) * self.factors))


def _scaled_tensor_parallel() -> nn.Module:
    rows: dict[str, Any] = {"input_layouts": Shard(0)}
    layers = {
        "first": ColwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(**rows),
        "down": RowwiseParallel(output_layouts=Shard(0)),
        "last": ColwiseParallel(**rows, output_layouts=Replicate()),
    }
    return parallelize_module(Scaled(), init_device_mesh("cpu", (2,)), layers)


def _sharded_tensor_parallel() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Block()
    model.last.bias.requires_grad_(False)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], int]] = {
    "megatron": (Megatron, _nothing, 0),
    "edited-megatron": (Megatron, _tripled_on_a_rank, 0),
    "gathered-columns": (GatheredColumns, _nothing, 0),
    "clipped-megatron": (Megatron, _clipped, 0),
    "once-megatron": (lambda: once(Megatron()), _nothing, 0),
    "once-tensor-parallel": (lambda: once(_tensor_parallel()), _nothing, 0),
    "once-replicated": (lambda: DistributedDataParallel(once(nn.Linear(WIDTH, 4), first=0)), _nothing, 1),
    "deep": (Deep, _nothing, 0),
    "sequence-parallel": (RowsOnAllRanks, _added_up, 0),
    "megatron-bfloat16": (Megatron, _nothing, 0),
    "experts": (Experts, _experts, 1),
    "balanced-experts": (BalancedExperts, _experts, 1),
    "overlapping-experts": (OverlappingExperts, _experts, 1),
    "wrapped-experts": (WrappedExperts, _divided_experts, 1),
    "holder": (Holder, lambda model: _averaged(model.last.parameters()), 1),
    "watched": (Watched, _nothing, 0),
    "not-zeroed-in-a-function": (NotZeroed, _nothing, 0),
    "alike-experts": (AlikeExperts, _experts, 1),
    "choosing-experts": (ChoosingExperts, _nothing, 0),
    "branches": (Branches, _nothing, 0),
    "checkpointed": (Checkpointed, _nothing, 0),
    "padded": (Padded, _nothing, 0),
    "flexible": (Flexible, _nothing, 0),
    "quantized-by-torch": (Quantized, _nothing, 0),
    "summed-ring": (RingAttention, _summed, 1),
    "variance": (lambda: DistributedDataParallel(Variance()), _nothing, 1),
    "similarity": (lambda: DistributedDataParallel(Similarity()), _nothing, 1),
    "quantised": (Quantised, _nothing, 0),
    "reversed": (Reversed, _nothing, 0),
    "ring": (RingAttention, lambda model: _averaged(model.parameters()), 1),
    "gathered-head": (GatheredHead, _divided, 1),
    "sharded-gathered-head": (lambda: GatheredHead(replicas=2), _divided, 1),
    "gathered-frozen-head": (lambda: GatheredHead(is_frozen=True), _nothing, 1),
    "tensor-parallel": (_tensor_parallel, _nothing, 0),
    "scaled-tensor-parallel": (_scaled_tensor_parallel, _nothing, 0),
    "sharded-tensor-parallel": (_sharded_tensor_parallel, _nothing, 2),
}
"""Models, changes to their gradients, and how many neighbouring ranks see the same samples (0: all)."""


def clip(model: nn.Module, in_parts: set[str]) -> None:
    """Clip by the norm of all parameters, divided or not, or as the mistake does."""
    if MISTAKE == "clipped-by-one-factor":
        for one in model.parameters():
            one.grad *= 0.7
        return
    if MISTAKE == "clipped-by-own-norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return
    gradients = {name: local(one.grad) for name, one in model.named_parameters() if one.grad is not None}
    if MISTAKE == "clipped-by-own-norm-by-hand":
        own = torch.stack([one.square().sum() for one in gradients.values()]).sum().sqrt()
        for one in model.parameters():
            one.grad *= 0.1 / own
        return
    parts = {name for name in gradients if name in in_parts or name.partition(".")[0] in in_parts}
    counted = parts if MISTAKE in ("clipped-by-all", "clipped-by-hand") else gradients
    square = torch.stack([gradients[name].square().sum() for name in counted]).sum()
    dist.all_reduce(square)
    square += sum(one.square().sum() for name, one in gradients.items() if name not in counted)
    for one in model.parameters():  # DTensors and plain tensors cannot be clipped together
        if MISTAKE == "clipped-by-hand":
            if one.grad is not None:
                one.grad *= 0.1 / square.sqrt()
            continue
        nn.utils.clip_grads_with_norm_([one], 0.1, square.sqrt())


def local(gradient: Any) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def train(scene: str) -> list[float]:
    """Train, and return the loss of each step."""
    make, finish, alike = MODELS[scene]
    rank = dist.get_rank()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank // alike if alike else 0)
    losses = []
    for _ in range(STEPS):
        if MISTAKE != "gradients-not-zeroed":
            optimizer.zero_grad()
        rows, targets = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 4))
        with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in scene):
            loss = functional.mse_loss(model(rows).float(), targets)
        if scene == "summed-ring" and MISTAKE != "loss-not-divided":
            loss = loss / dist.get_world_size()
        loss.backward()
        finish(model)
        if MISTAKE.startswith("clipped"):
            clip(model, {"up.weight", "up.bias", "down.weight", "expert", "branches"})
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_stages(scene: str) -> list[float]:
    """Train a pipeline of two stages by hand, or with a schedule of torch; return no losses."""
    rank = dist.get_rank()
    wide = 2 * WIDTH
    stages = [nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, end)) for end in (WIDTH, 4)]
    stage = stages[rank]
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    if MISTAKE == "one-weight-tripled" and rank == 1:
        stage[0].weight.register_hook(lambda gradient: gradient * 3)
    generator = torch.Generator().manual_seed(0)
    kinds = {"pipeline-of-torch": _scheduled, "pipeline-with-buffers": _with_buffers}
    step = kinds.get(scene, _by_hand)(stage)
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows, targets = (torch.randn(2 * ROWS, width, generator=generator) for width in (WIDTH, 4))
        step(rows, targets)
        if MISTAKE.startswith("clipped"):
            clip(stage, {"0", "2"})
        optimizer.step()
    return []


def _scheduled(stage: nn.Module) -> Callable[[Tensor, Tensor], None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    schedule = Schedule1F1B(PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu")), 2, functional.mse_loss)

    def step(rows: Tensor, targets: Tensor) -> None:
        schedule.step(*([rows] if dist.get_rank() == 0 else []), target=targets if dist.get_rank() else None)

    return step


def _by_hand(stage: nn.Module) -> Callable[[Tensor, Tensor], None]:
    def step(rows: Tensor, targets: Tensor) -> None:
        for own, wanted in zip(rows.chunk(2), targets.chunk(2), strict=True):
            if dist.get_rank() == 0:
                sent = stage(own)
                dist.send(sent.detach(), 1)
                gradient = torch.empty_like(sent)
                dist.recv(gradient, 1)
                sent.backward(gradient)
            else:
                received = torch.empty(ROWS, WIDTH)
                dist.recv(received, 0)
                received.requires_grad_()
                (functional.mse_loss(stage(received), wanted) / 2).backward()
                dist.send(received.grad * (2 if MISTAKE == "gradient-sent-doubled" else 1), 0)

    return step


def _with_buffers(stage: nn.Module) -> Callable[[Tensor, Tensor], None]:
    """Receive into the same memory each time, and compute with copies of it, like DeepSpeed."""
    received, gradient = torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH)

    def step(rows: Tensor, targets: Tensor) -> None:
        for own, wanted in zip(rows.chunk(2), targets.chunk(2), strict=True):
            if dist.get_rank() == 0:
                sent = stage(own)
                dist.send(sent.detach(), 1)
                dist.recv(gradient, 1)
                sent.backward(gradient)
            else:
                dist.recv(received, 0)
                leaf = received.detach().requires_grad_()
                (functional.mse_loss(stage(leaf.clone()), wanted) / 2).backward()
                dist.send(leaf.grad, 0)

    return step


def run(scene: str, mistake: str = "") -> list[float]:
    """Train on the ranks of the current process group, and return the losses."""
    global MISTAKE
    MISTAKE = mistake
    torch.manual_seed(0)
    return (train_stages if scene.startswith("pipeline") else train)(scene)
