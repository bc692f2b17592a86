"""Losses that communicate, as functions of outputs or inside models, and modules that are run in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import joint_scenes
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from plumbline.replay.applied_functions import keep_functions_patched

STEPS = 4
WIDTH = 16
ROWS = 8
MISTAKE = ""
"""The current training's mistake; "" for a right one."""

PAIRS = {"parts": [[0, 1], [2, 3]], "replicas": [[0, 2], [1, 3]]}
"""The process groups of four ranks over which a model is divided, and those of ranks with the same part."""

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gathered(torch.autograd.Function):
    """Gathers the rows of all ranks."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(every, rows.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        if MISTAKE != "not-reduced":
            dist.all_reduce(gradient)  # in place, as many scripts do
        own = gradient.chunk(dist.get_world_size())[dist.get_rank()]
        return own * dist.get_world_size() if MISTAKE == "counted-on-each-rank" else own


keep_functions_patched()  # like `plumbline check` when torch is imported
gather = Gathered.apply
"""Looked up before recording starts, as in scripts that keep a reference."""


class FromNeighbour(torch.autograd.Function):
    """The rows of the rank before this one, as in SigLIP."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return _exchanged(rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient if MISTAKE == "not-sent-back" else _exchanged(gradient)


def _exchanged(values: Tensor) -> Tensor:
    received = torch.empty_like(values)
    operations = [
        dist.P2POp(operation, one, 1 - dist.get_rank())
        for operation, one in ((dist.isend, values.contiguous()), (dist.irecv, received))
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class Statistics(torch.autograd.Function):
    """Sums over all ranks."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if MISTAKE != "not-reduced":
            dist.all_reduce(gradient)
        return gradient


class Straight(torch.autograd.Function):
    """Rounds rows to the mean over ranks, and passes the gradient through: an intended custom derivative."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        mean = rows.mean(0)
        dist.all_reduce(mean)
        return (rows - mean).sign() * rows.abs().mean() + mean

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8, bias=False)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ours, theirs = functional.normalize(self.one(ours)), functional.normalize(self.other(theirs))
        return ours, theirs, self.scale.exp()


def contrast(ours: Tensor, theirs: Tensor, scale: Tensor, *, by_torch: bool = False) -> Tensor:
    """Compare own rows with those of all ranks, as in CLIP."""
    if by_torch:
        every = [torch.cat(with_gradients.all_gather(one)) for one in (ours, theirs)]
    else:
        every = [gather(one) for one in (ours, theirs)]
    place = torch.arange(len(ours)) + dist.get_rank() * len(ours)
    logits = ours @ every[1].T, theirs @ every[0].T
    return sum(functional.cross_entropy(scale * one, place) for one in logits) / 2


def neighbour(ours: Tensor, theirs: Tensor, scale: Tensor) -> Tensor:
    """Own rows against those of the other rank."""
    return functional.softplus(scale * ours @ FromNeighbour.apply(theirs).T).mean() - (ours * theirs).mean()


def variance(ours: Tensor, theirs: Tensor, scale: Tensor) -> Tensor:
    """Compute the statistics of all rows on every rank, as in VICReg."""
    every = [Gathered.apply(one) for one in (ours, theirs)]
    return functional.mse_loss(*every) * scale + sum((1 - one.var(0).sqrt()).relu().mean() for one in every)


def correlation(ours: Tensor, theirs: Tensor, scale: Tensor, *, in_place: bool = False) -> Tensor:
    """Compute the correlation over all rows, as in Barlow Twins, which sums it in place with its own code."""
    found = ours.T @ theirs / (len(ours) * dist.get_world_size())
    if in_place:
        dist.all_reduce(found)
    else:
        found = with_gradients.all_reduce(found)
    return (found - torch.eye(len(found))).square().sum() * scale


def printed(ours: Tensor, theirs: Tensor, scale: Tensor) -> Tensor:
    """A loss that is summed in place, to be printed."""
    loss = functional.mse_loss(ours * scale, theirs)
    dist.all_reduce(loss)
    return loss


def straight(ours: Tensor, theirs: Tensor, scale: Tensor) -> Tensor:
    return functional.mse_loss(Straight.apply(ours) * scale, theirs)


LOSSES: dict[str, Loss] = {
    "contrast": contrast,
    "contrast-of-torch": partial(contrast, by_torch=True),
    "neighbour": neighbour,
    "variance": variance,
    "correlation": correlation,
    "correlation-in-place": partial(correlation, in_place=True),
    "printed": printed,
    "straight": straight,
}


class Inside(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.encoders, self.loss = Encoders(), loss

    def forward(self, ours: Tensor, theirs: Tensor) -> Tensor:
        return self.loss(*self.encoders(ours, theirs))


class Normalised(nn.Module):
    """Normalises over the rows of all ranks, like SyncBatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32, bias=False), nn.Linear(32, 4)
        self.weight, self.bias = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))

    def forward(self, rows: Tensor) -> Tensor:
        values = self.first(rows)
        mean, square = Statistics.apply(torch.stack([values.mean(0), values.square().mean(0)])) / dist.get_world_size()
        values = (values - mean) * (square - mean.square() + 1e-5).rsqrt()
        return self.last(functional.gelu(values * self.weight + self.bias))


class Recomputed(joint_scenes.Megatron):
    """A divided layer inside an activation checkpoint, with dropout."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def layer(self, values: Tensor) -> Tensor:
        middle = functional.linear(joint_scenes.Copied.apply(values), self.up, self.bias)
        middle = functional.dropout(functional.gelu(middle), 0.1)
        return joint_scenes.Summed.apply(functional.linear(middle, self.down))

    def forward(self, values: Tensor) -> Tensor:
        values = self.norm(self.first(values))
        return self.last(values + checkpoint(self.layer, values, use_reentrant=self.reentrant))


class Likelihood(torch.autograd.Function):
    """Cross-entropy of logits whose classes are divided over the ranks, as in Megatron."""

    @staticmethod
    def forward(context: Any, logits: Tensor, classes: Tensor) -> Tensor:
        logits = logits.float()
        exponentials = logits.exp()
        group = joint_scenes.GROUP
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        own = functional.one_hot(classes, logits.shape[1] * dist.get_world_size(group))
        own = own.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].to(logits.dtype)
        picked = (logits * own).sum(-1)
        dist.all_reduce(picked, group=group)
        if MISTAKE == "class-on-each-rank":
            own = functional.one_hot(classes % logits.shape[1], logits.shape[1]).to(logits.dtype)
        context.save_for_backward(exponentials / total.unsqueeze(-1) - own)
        return total.log() - picked

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (difference,) = context.saved_tensors
        times = dist.get_world_size(joint_scenes.GROUP) if MISTAKE == "counted-on-each-rank" else 1
        return times * difference * gradient.unsqueeze(-1), None


class Vocabulary(nn.Module):
    """A head whose classes are divided over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(joint_scenes.GROUP), dist.get_world_size(joint_scenes.GROUP)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Parameter((torch.randn(8, WIDTH) / 4).chunk(world)[rank].clone())

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(joint_scenes.Copied.apply(self.first(rows)), self.head)


class Added(nn.Module):
    """A bias for this rank's classes, which starts equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8 // dist.get_world_size()))

    def forward(self, logits: Tensor) -> Tensor:
        return logits + self.bias


MODULES: dict[str, Callable[[], nn.Module]] = {
    "normalised": lambda: DistributedDataParallel(Normalised()),
    "checkpoint": lambda: Recomputed(reentrant=False),
    "reentrant-checkpoint": lambda: Recomputed(reentrant=True),
    "vocabulary": Vocabulary,
    "vocabulary-with-bias": lambda: nn.Sequential(Vocabulary(), Added()),
    "compiled": lambda: torch.compile(joint_scenes.Megatron(), backend="aot_eager"),
}


def run(scene: str, mistake: str = "") -> None:
    """Train on the ranks of the current process group: with a loss, one ``inside`` the model, or one of ``MODULES``."""
    global MISTAKE
    MISTAKE = joint_scenes.MISTAKE = mistake
    torch.manual_seed(0)
    name, _, inside = scene.partition(" ")
    if name in MODULES:
        model, step = MODULES[name](), _classify if name.startswith("vocabulary") else _fit
    elif inside:
        model, step = DistributedDataParallel(Inside(LOSSES[name])), _of_model
    else:
        model, step = DistributedDataParallel(Encoders()), partial(_of_outputs, LOSSES[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    alike = name in MODULES and name != "normalised"
    generator = torch.Generator().manual_seed(0 if alike else dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(model, *(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))).backward()
        optimizer.step()


def train_in_pairs(mistake: str = "") -> None:
    """Train two replicas of ``Vocabulary``, each divided over two of four ranks, and average them by hand."""
    global MISTAKE
    MISTAKE = mistake
    groups = {kind: [dist.new_group(ranks) for ranks in every] for kind, every in PAIRS.items()}
    rank = dist.get_rank()
    joint_scenes.GROUP, replicas = groups["parts"][rank // 2], groups["replicas"][rank % 2]
    torch.manual_seed(0)
    model = Vocabulary()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank // 2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        _classify(model, *(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))).backward()
        for name, one in model.named_parameters():
            if mistake == "bias-not-averaged" and name == "first.bias":
                continue
            dist.all_reduce(one.grad, group=replicas)
            one.grad /= 1 if mistake == "not-divided" else 2
        optimizer.step()


def train_with_an_own_head(kind: str) -> None:
    """Train a model whose head no rank reduces, with gradients that are summed over ranks.

    The loss is ``logged`` or ``printed`` as the sum over ranks, or its derivative is ``given`` by the script.
    """
    torch.manual_seed(0)
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows, targets = (torch.randn(8 * ROWS, width, generator=generator) for width in (WIDTH, 4))
        outputs = model(rows)
        loss = functional.mse_loss(outputs, targets) / dist.get_world_size()
        if kind == "given":
            outputs.backward((outputs - targets).detach() / targets.numel())
        else:
            dist.all_reduce(loss if kind == "printed" else loss.detach())
            loss.backward()
        for name, one in model.named_parameters():
            if not name.startswith("last"):
                dist.all_reduce(one.grad)
        optimizer.step()


def train_otherwise_on_one_rank(kind: str) -> None:
    """Train a model whose outputs only one rank compares with those of all ranks, or whose gradients it gives itself.

    Nothing flows back to the other rank.
    """
    global MISTAKE
    MISTAKE = "not-reduced"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        outputs, targets = model(torch.randn(ROWS, WIDTH, generator=generator)), torch.zeros(ROWS, 4)
        own = outputs if dist.get_rank() == 0 and kind == "gathered" else outputs.detach()
        every = gather(own) if kind == "gathered" else own
        if dist.get_rank() == 0 and kind == "given":
            outputs.backward(2 * own / own.numel())
        else:
            loss = functional.mse_loss(outputs, targets)
            (loss + every.mean() if every.requires_grad else loss).backward()
        optimizer.step()


def _fit(model: nn.Module, rows: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(model(rows), targets[:, :4])


def _classify(model: nn.Module, rows: Tensor, others: Tensor) -> Tensor:
    loss: Tensor = Likelihood.apply(model(rows), others[:, :8].argmax(-1)).mean()
    return loss


def _of_model(model: nn.Module, ours: Tensor, theirs: Tensor) -> Tensor:
    loss: Tensor = model(ours, theirs)
    return loss


def _of_outputs(loss: Loss, model: nn.Module, ours: Tensor, theirs: Tensor) -> Tensor:
    return loss(*model(ours, theirs))
