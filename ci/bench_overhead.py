"""What the trainer's loop costs over one written by hand: a ratio, for one process and for ddp with 2 ranks.

    python ci/bench_overhead.py [--steps 300] [--rounds 31]

The two loops take turns (A B A B …) in the same processes, on a 64-256-8 MLP with batch 32 and a loader that
hardly costs anything; a ratio compares neighbours, and the median of the ratios is printed. Steps are timed
from the first forward on, so neither setup nor start of ranks counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from harness.trainer import Module, Trainer
from harness.trainer.environments.plain import free_port

LIMIT = 1.05
BATCH = 32


class Points(Dataset):
    """Samples that are fetched a batch at a time, so that the loader does not hide the loop."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, 64, generator=generator)
        self.labels = torch.randint(8, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch."""
        return self.inputs[indices], self.labels[indices]


def same(batch: object) -> object:
    """Return the batch: it is collated already."""
    return batch


class Classifier(Module):
    """The MLP for the trainer; ``begun`` is when its first step began."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__()
        self.net = mlp()
        self.dataset = dataset
        self.begun = 0.0

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        if not batch_idx:
            self.begun = time.perf_counter()
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        """Return the loader."""
        return DataLoader(self.dataset, batch_size=BATCH, shuffle=True, collate_fn=same)


def mlp() -> nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


def by_hand(dataset: Dataset, world: int, rank: int) -> float:
    """Train an epoch by hand; return its seconds."""
    net = mlp()
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sampler = DistributedSampler(dataset, world, rank) if world > 1 else None
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, shuffle=sampler is None, collate_fn=same)
    begun = 0.0
    for index, (inputs, labels) in enumerate(loader):
        if not index:
            begun = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begun


def by_trainer(dataset: Dataset, world: int) -> float:
    """Train an epoch with the trainer; return its seconds."""
    module = Classifier(dataset)
    Trainer(gpus=world, distributed_backend="ddp" if world > 1 else None, accelerator="cpu").fit(module)
    return time.perf_counter() - module.begun


def measure(rank: int, world: int, port: int, steps: int, rounds: int) -> None:
    """Print the ratio, on rank 0."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    dataset = Points(steps * BATCH * world)
    ratios, best = [], {"hand": float("inf"), "trainer": float("inf")}
    for number in range(rounds + 1):
        pair = {}
        for name in ("hand", "trainer") if number % 2 else ("trainer", "hand"):
            pair[name] = by_hand(dataset, world, rank) if name == "hand" else by_trainer(dataset, world)
            gc.collect()  # also lets DDP go before its process group
        if number:  # the first round warms up
            ratios.append(pair["trainer"] / pair["hand"])
            best = {name: min(best[name], pair[name]) for name in best}
    if rank == 0:
        hand, trainer = (best[name] / steps * 1e6 for name in ("hand", "trainer"))
        median = statistics.median(ratios)
        print(
            f"{world} process(es): by hand {hand:.0f} µs a step, trainer {trainer:.0f} µs; "
            f"ratio of the fastest {trainer / hand:.3f}, median of {rounds} ratios {median:.3f} "
            f"({'within' if median <= LIMIT else 'over'} {LIMIT})",
            flush=True,
        )
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    for world in (1, 2):
        arguments = (world, free_port(), options.steps, options.rounds)
        torch.multiprocessing.start_processes(measure, arguments, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
