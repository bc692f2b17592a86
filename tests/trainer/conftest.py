"""A small problem, and a hand-written loop to compare the trainer with."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from plumbline.trainer import Module

LAUNCHER_VARIABLES = (
    "SLURM_",
    "TORCHELASTIC_",
    "MASTER_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Nothing from the environment reaches a test, and no process outlives it."""
    for variable in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(variable)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert not multiprocessing.active_children()
    assert not torch.distributed.is_initialized()


class Points(Dataset):
    """Regression samples in float64, with their index."""

    def __init__(self, samples=26, features=5):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, features, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(samples, 1, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"x": self.inputs[index], "y": self.targets[index], "index": index}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


class Regression(Module):
    """The problem for the trainer; with ``log``, training_step writes its samples to a file per rank."""

    def __init__(self, batch_size=6, samples=26, log=None, validates=False, **loader):
        super().__init__()
        self.net = network()
        self.dataset = Points(samples)
        self.loader = {"batch_size": batch_size, "shuffle": True, **loader}
        self.log = log and Path(log)
        self.validates = validates

    def training_step(self, batch, batch_idx):
        if self.log:
            with open(self.log / f"rank{self.trainer.rank}.jsonl", "a") as file:
                file.write(json.dumps(batch["index"].tolist()) + "\n")
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def validation_step(self, batch, batch_idx):
        return {"mse": nn.functional.mse_loss(self.net(batch["x"]), batch["y"])}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(self.dataset, **self.loader)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=5) if self.validates else None


def orders(samples, epochs, world=1, seed=0):
    """The order of each epoch, written independently: drawn from seed + epoch, padded to the world size."""
    for epoch in range(epochs):
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
        yield torch.cat([order, order[: -samples % world]])


def by_hand(*, epochs=2, batch=6, world=1, accumulate=1, clip=None, samples=26, steps=None):
    """Train by hand in float64 with ``batch`` samples per rank; return the network.

    A micro-batch's loss is the mean over ranks of each one's mean; a step's the mean over its micro-batches.
    """
    data, net = Points(samples), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    done = 0
    for order in orders(samples, epochs, world):
        micro = order.split(batch * world)
        for start in range(0, len(micro), accumulate):
            if done == steps:
                return net
            window = micro[start : start + accumulate]
            losses = [
                nn.functional.mse_loss(net(data.inputs[share]), data.targets[share])
                for indices in window
                for share in [indices[rank::world] for rank in range(world)]
            ]
            optimizer.zero_grad()
            (sum(losses) / len(losses)).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            done += 1
    return net


def same_weights(left, right, tolerance=1e-13):
    """Weights are equal up to float64 rounding, and all of them have moved."""
    pairs = list(zip(left.parameters(), right.parameters(), strict=True))
    moved = any(not torch.equal(a, b) for a, b in zip(left.parameters(), network().parameters(), strict=True))
    return moved and all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


class Problem:
    """Helpers that test files share, because they cannot import one another."""

    Points = Points
    Regression = Regression
    network = staticmethod(network)
    orders = staticmethod(orders)
    by_hand = staticmethod(by_hand)
    same_weights = staticmethod(same_weights)

    @staticmethod
    def logged(folder, world):
        """The samples of each call of training_step, for each rank."""
        return [
            [json.loads(line) for line in (Path(folder) / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(world)
        ]


@pytest.fixture
def problem():
    return Problem
