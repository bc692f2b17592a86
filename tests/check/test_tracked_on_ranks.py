"""Calls under wrappers and hooks that communicate: DistributedDataParallel, ``fully_shard``, collectives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from replaying import recording
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Gathering(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.all_gather(super().forward(x)))


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def compiled_outside(model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="eager")


def compiled_inside(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(torch.compile(model, backend="eager"))


def sharded(model: nn.Module, **options: object) -> nn.Module:
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def sharded_in_bfloat16(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def train(rank: int, make: Callable[[nn.Module], nn.Module], digits: float, *, record: bool) -> list[float]:
    """Train for two steps of two micro-batches; every gradient is the mean of the exact ones over the ranks."""
    torch.manual_seed(0)
    model = make(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    losses = []
    with recording() as recorded:
        if not record:
            recorded.calls.stop()
        for _ in range(2):
            for _ in range(2):
                loss = model(torch.randint(0, 10, (4, 6))).float().pow(2).mean()
                recorded.backward(loss)
                losses.append(loss.item())
            if record:
                assert_mean_of_exact(*recorded.total(), model, digits)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def assert_mean_of_exact(exact: dict[nn.Parameter, Tensor], uncovered: object, model: nn.Module, digits: float) -> None:
    assert not uncovered
    for parameter in model.parameters():
        expected = exact[parameter].clone()
        dist.all_reduce(expected)
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert float((gradient - expected / RANKS).norm()) <= digits * float(expected.norm())


def _rank(rank: int, store: str, work: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    work(rank)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # releasing DDP may hang


def _in_float32(rank: int) -> None:
    for make in (wrapped, compiled_outside, compiled_inside, sharded):
        recorded = train(rank, make, 1e-5, record=True)
        assert recorded == train(rank, make, 1e-5, record=False), make


def _in_bfloat16(rank: int) -> None:
    train(rank, sharded_in_bfloat16, 0.05, record=True)


def _gathering(rank: int) -> None:
    model = DistributedDataParallel(Gathering(4, 4))
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 4)).sum())
        gradients, uncovered = recorded.total()
    assert not gradients
    assert all("communicates" in reason for reason in uncovered.values())
    assert len(uncovered) == 2


def _everything(rank: int) -> None:
    _in_float32(rank)
    _in_bfloat16(rank)
    _gathering(rank)


def test_wrappers_that_communicate(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pytestconfig.rootpath)  # spawned ranks import this module by its name
    torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"), _everything), RANKS)
