"""A ``Trainer`` class under DistributedDataParallel, started by torchrun.

Written anew after pytorch/examples, distributed/ddp-tutorial-series/multigpu_torchrun.py (BSD-3-Clause): the same
structure, and the same calls in the same order. Differences: the device may be the CPU; the loss is at the top.
"""

from __future__ import annotations

import os

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

loss_function = torch.nn.CrossEntropyLoss()


def ddp_setup(backend):
    """Join the process group that torchrun's environment variables describe."""
    init_process_group(backend=backend)


class Trainer:
    """Trains a model on the batches of a loader, and saves snapshots."""

    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.snapshot_path = snapshot_path
        self.epochs_run = 0
        if os.path.exists(snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model, device_ids=[self.rank] if self.device.type == "cuda" else None)

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location=self.device)
        self.model.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs_run"]

    def _save_snapshot(self, epoch):
        snapshot = {"model": self.model.module.state_dict(), "epochs_run": epoch + 1}
        torch.save(snapshot, self.snapshot_path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = loss_function(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        print(f"[rank {self.rank}] epoch {epoch}, {len(self.train_data)} steps")
        for source, targets in self.train_data:
            source = source.to(self.device)
            targets = targets.to(self.device)
            self._run_batch(source, targets)

    def train(self, max_epochs):
        """Train until ``max_epochs`` epochs are done, including those before the snapshot."""
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)


def load_train_objs():
    """Return data, model and optimizer."""
    train_set = TensorDataset(torch.rand(2048, 20), torch.rand(2048, 1))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_set, model, optimizer


def prepare_dataloader(dataset, batch_size):
    """Return the batches of this rank."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        pin_memory=torch.cuda.is_available(),
        shuffle=False,
        sampler=DistributedSampler(dataset),
    )


def main(save_every, total_epochs, batch_size, snapshot_path="snapshot.pt", backend=None):
    """Train on this rank."""
    ddp_setup(backend)
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer, save_every, snapshot_path)
    trainer.train(total_epochs)
    destroy_process_group()
