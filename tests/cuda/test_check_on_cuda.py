"""``plumbline check`` on CUDA devices: TF32, float16 scaling, fused kernels, and nondeterministic reductions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cuda

WIDTH, CLASSES, STEPS, RANKS = 128, 10, 4, 2


class Attention(nn.Module):
    """A block with heads of width 32 and dropout, which flash attention supports in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.outputs = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.inputs(self.norm(tokens)).chunk(3, dim=-1)
        query, key, value = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in parts)
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        return tokens + self.outputs(mixed.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks, self.checkpointed = nn.ModuleList([Attention(), Attention()]), checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding((inputs.abs() * 10).long().clamp(max=49))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.head(hidden).mean(1)


class Scattered(nn.Module):
    """Adds rows to nodes, like graph networks; CUDA adds them in a nondeterministic order."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        edges = torch.arange(WIDTH, device=inputs.device) * 7 % 64
        hidden = self.inputs(inputs).relu()
        nodes = hidden.new_zeros(len(inputs), 64).index_add(1, edges, hidden)
        return self.head(hidden + nodes.gather(1, edges.expand_as(hidden)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, CLASSES))


def images() -> nn.Module:
    convolutions = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3, stride=2)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def adam(parameters: Iterator[nn.Parameter], **settings: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, **settings)


def train(
    model: Callable[[], nn.Module] = mlp,
    shape: tuple[int, ...] = (WIDTH,),
    *,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = adam,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    micro_batches: int = 1,
    clips: str = "",
    precision: str = "highest",
    channels_last: bool = False,
) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.preserve_format
    network = wrap(model().to("cuda", dtype, memory_format=layout))
    steps = optimizer(network.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=autocast is torch.float16)
    torch.manual_seed(1 + int(os.environ["RANK"]))
    for _ in range(STEPS):
        for number in range(micro_batches):
            inputs = torch.randn(8, *shape, device="cuda", dtype=dtype).to(memory_format=layout)
            labels = torch.randint(CLASSES, (8,), device="cuda")
            last = number == micro_batches - 1 or not hasattr(network, "no_sync")
            with nullcontext() if last else network.no_sync():
                with torch.autocast("cuda", autocast or torch.float16, enabled=autocast is not None):
                    loss = cross_entropy(network(inputs).float(), labels)
                scaler.scale(loss / micro_batches).backward()
        if clips == "after unscaling":
            scaler.unscale_(steps)
        if clips:
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()


HALF, BFLOAT = torch.float16, torch.bfloat16
SEQUENCE = (16,)
IMAGE = (3, 16, 16)

RIGHT = {
    "float32": train,
    "tf32": partial(train, precision="high"),
    "bf16 products of float32": partial(train, precision="medium"),
    "fused adam": partial(train, optimizer=partial(adam, fused=True)),
    "capturable adam": partial(train, optimizer=partial(adam, capturable=True)),
    "adam one by one": partial(train, optimizer=partial(adam, foreach=False)),
    "momentum": partial(train, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "micro-batches": partial(train, micro_batches=3),
    "convolutions in tf32": partial(train, images, IMAGE),
    "channels last": partial(train, images, IMAGE, channels_last=True),
    "convolutions in float16": partial(train, images, IMAGE, autocast=HALF, channels_last=True),
    "float16": partial(train, autocast=HALF),
    "float16, clipped": partial(train, autocast=HALF, clips="after unscaling"),
    "float16, fused adam": partial(train, autocast=HALF, optimizer=partial(adam, fused=True)),
    "float16, micro-batches": partial(train, Tokens, SEQUENCE, autocast=HALF, micro_batches=2),
    "attention": partial(train, Tokens, SEQUENCE),
    "attention in bfloat16": partial(train, Tokens, SEQUENCE, autocast=BFLOAT),
    "attention, checkpointed": partial(train, partial(Tokens, checkpointed=True), SEQUENCE, autocast=BFLOAT),
    "bfloat16 weights": partial(train, dtype=BFLOAT),
    "scattered": partial(train, Scattered),
    "compiled": partial(train, lambda: torch.compile(mlp())),
}

WRONG = {
    "not-synchronised": partial(train, wrap=nn.Sequential),
    "clipped-before-unscaling": partial(train, autocast=HALF, clips="before unscaling"),
    "not-synchronised in tf32": partial(train, images, IMAGE, wrap=nn.Sequential, precision="high"),
}


@pytest.mark.parametrize("training", RIGHT.values(), ids=RIGHT)
def test_a_right_training_is_right_in_full(plumbline, training):
    plumbline.check(training, ranks=RANKS, steps=STEPS).assert_right(require_full=True)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_one_rank_on_nccl(plumbline, wrap):
    training = partial(train, Tokens, SEQUENCE, autocast=BFLOAT, wrap=wrap, micro_batches=2)
    plumbline.check(training, ranks=1, steps=STEPS).assert_right(require_full=True)


@pytest.mark.parametrize("training", WRONG.values(), ids=WRONG)
def test_a_mistake_is_found(plumbline, training):
    with pytest.raises(AssertionError, match="wrong: "):
        plumbline.check(training, ranks=RANKS, steps=STEPS).assert_right()
