"""Random right trainings: a seed draws each setting, and users may write every combination."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Settings:
    """One training on ``world`` ranks; the other fields are named after the choices."""

    world: int
    model: str
    reduction: str
    optimizer: str
    precision: str
    accumulate: int
    no_sync: bool
    clip: str
    loss: str
    zero: str
    schedule: bool
    frozen: bool
    unused: bool
    ema: bool
    data: str
    several: bool
    checkpointed: bool
    bucket_view: bool
    seed: int

    @staticmethod
    def drawn(seed: int) -> Settings:
        """Return the settings of a seed."""
        draw = random.Random(seed)
        world = draw.choice([1, 1, 2, 2, 3])
        precision = draw.choice(["32", "32", "32", "bf16", "16", "64"])
        models = ["mlp", "cnn", "transformer", "tied", "embedding"]
        return Settings(
            world=world,
            # torch 2.13 has no 16-bit LSTM on the CPU.
            model=draw.choice(models if precision in ("16", "bf16") else [*models, "lstm"]),
            reduction=draw.choice(["ddp", "ddp", "by hand", "summed"]) if world > 1 else "none",
            optimizer=draw.choice(
                ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "nadam", "fused", "foreach"]
            ),
            precision=precision,
            accumulate=draw.choice([1, 1, 2, 3, 4]),
            no_sync=draw.random() < 0.5,
            clip=draw.choice(["no", "no", "norm", "norm", "value", "by hand"]),
            loss=draw.choice(["mean", "mean", "tokens", "sum", "two"]),
            zero=draw.choice(["before", "after", "module", "to zero"]),
            schedule=draw.random() < 0.4,
            frozen=draw.random() < 0.2,
            unused=draw.random() < 0.15,
            ema=draw.random() < 0.2,
            data=draw.choice(["random", "loader"]),
            several=draw.random() < 0.2,
            checkpointed=draw.random() < 0.15,
            bucket_view=draw.random() < 0.3,
            seed=seed,
        )


CLASSES = 7


class Network(nn.Module):
    """A classifier of vectors (48 numbers) or of sequences (12 tokens out of 30)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.kind = settings.model
        self.checkpointed = settings.checkpointed
        width = 32
        if self.kind in ("transformer", "lstm", "tied", "embedding"):
            self.embed = nn.Embedding(30, width)
        if self.kind == "mlp":
            self.body: nn.Module = nn.Sequential(
                nn.Linear(48, 70), nn.LayerNorm(70), nn.GELU(), nn.Dropout(0.1), nn.Linear(70, width), nn.ReLU()
            )
        elif self.kind == "cnn":
            self.body = nn.Sequential(
                nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(), nn.Linear(368, width)
            )
        elif self.kind == "transformer":
            self.body = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        elif self.kind == "lstm":
            self.body = nn.LSTM(width, width, batch_first=True)
        else:
            self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 30 if self.kind == "tied" else CLASSES)
        if self.kind == "tied":
            self.head.weight = self.embed.weight
        if settings.unused:
            self.spare = nn.Linear(5, 5)
        if settings.frozen:
            self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, classes) for ``x`` (batch, 48) or (batch, 12)."""
        if self.kind == "cnn":
            x = x.unsqueeze(1)
        elif hasattr(self, "embed"):
            x = self.embed(x)
        y = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        if isinstance(y, tuple):
            y = y[0]
        if y.dim() == 3:
            y = y.mean(1)
        scores: Tensor = self.head(y)
        return scores


def train(settings: Settings, rank: int) -> None:
    """Train one rank for some steps; needs a process group."""
    torch.manual_seed(settings.seed)
    double = settings.precision == "64"
    model: nn.Module = Network(settings)
    if double:
        model = model.double()
    plain = model
    if settings.reduction == "ddp":
        model = DistributedDataParallel(
            model, find_unused_parameters=settings.unused, gradient_as_bucket_view=settings.bucket_view
        )
    optimizers = list(_optimizers(settings, plain))
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2) for one in optimizers] if settings.schedule else []
    average = copy.deepcopy(plain) if settings.ema else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=settings.precision == "16")
    torch.manual_seed(settings.seed + 1000 + rank)
    batches = _batches(settings, rank, double)
    for _ in range(5):
        _zero(settings, "before", optimizers, plain)
        for index in range(settings.accumulate):
            with _waiting(settings, model, index):
                x, y = next(batches)
                with _autocast(settings.precision):
                    loss = _loss(settings, model(x), y)
                torch.autograd.backward(scaler.scale(loss))
        _reduce(settings, plain)
        for one in optimizers:
            scaler.unscale_(one)
        _clip(settings, plain)
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        _zero(settings, "after", optimizers, plain)
        if average is not None:
            with torch.no_grad():
                for old, new in zip(average.parameters(), plain.parameters(), strict=True):
                    old.lerp_(new, 0.1)


def _waiting(settings: Settings, model: nn.Module, place: int) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a micro-batch is not reduced."""
    if settings.no_sync and place < settings.accumulate - 1 and isinstance(model, DistributedDataParallel):
        waiting: contextlib.AbstractContextManager[Any] = model.no_sync()
        return waiting
    return contextlib.nullcontext()


def _optimizers(settings: Settings, model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [parameters[::2], parameters[1::2]] if settings.several else [parameters]
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05),
        "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        "adam": lambda p: torch.optim.Adam(p, 1e-3),
        "adamw": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 1e-2}, {"params": p[1:]}], 1e-3, amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
        "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
        "fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
        "foreach": lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
    }
    yield from map(make[settings.optimizer], groups)


def _batches(settings: Settings, rank: int, double: bool) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(settings.seed)
    sequences = settings.model in ("transformer", "lstm", "tied", "embedding")

    def made(count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        x = (
            torch.randint(30, (count, 12), generator=generator)
            if sequences
            else torch.randn(count, 48, generator=generator)
        )
        return (x.double() if double and not sequences else x), torch.randint(CLASSES, (count,), generator=generator)

    if settings.data == "random":
        while True:
            yield made(8, None)
    dataset = TensorDataset(*made(97, generator))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, settings.world, rank, seed=settings.seed)
    loader = DataLoader(dataset, 8, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _autocast(precision: str) -> contextlib.AbstractContextManager[Any]:
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _loss(settings: Settings, scores: Tensor, y: Tensor) -> Tensor:
    divisor = settings.accumulate * (settings.world if settings.reduction == "summed" else 1)
    if settings.loss == "sum":
        return functional.cross_entropy(scores, y, reduction="sum") / 8 / divisor
    if settings.loss == "tokens":
        y = torch.where(torch.rand(y.shape) < 0.3, -100, y)
        y[0] = 0
        return functional.cross_entropy(scores, y) / divisor
    if settings.loss == "two":
        return (functional.cross_entropy(scores, y, label_smoothing=0.1) + 0.01 * scores.square().mean()) / divisor
    return functional.cross_entropy(scores, y) / divisor


def _reduce(settings: Settings, model: nn.Module) -> None:
    if settings.reduction not in ("by hand", "summed"):
        return
    for one in model.parameters():
        if one.requires_grad:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
            dist.all_reduce(one.grad)
            if settings.reduction == "by hand":
                one.grad /= settings.world


def _clip(settings: Settings, model: nn.Module) -> None:
    if settings.clip == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    elif settings.clip == "value":
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    elif settings.clip == "by hand":
        gradients: Iterable[Tensor] = [one.grad for one in model.parameters() if one.grad is not None]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        if norm > 0.3:
            for one in gradients:
                one.mul_(0.3 / norm)


def _zero(settings: Settings, when: str, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
    if settings.zero == "module" and when == "after":
        model.zero_grad()
    elif settings.zero == "to zero" and when == "before":
        for one in optimizers:
            one.zero_grad(set_to_none=False)
    elif settings.zero == when:
        for one in optimizers:
            one.zero_grad()
