"""A stage that raises, dies or hangs, anywhere, ends the training with a message about it and leaves no process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plumbline.trainer import Module, RankError, Trainer

PLACES = ["loader", "forward", "backward", "optimizer", "validation"]


def raises():
    raise ValueError("out of paper")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    threading.Event().wait()


class Failing(Module):
    """In one of three batches, one stage fails at one place."""

    def __init__(self, fault=None, place=None, stage=None, step=1):
        super().__init__()
        self.fault, self.place, self.stage, self.step = fault, place, stage, step
        # Wherever the plan cuts, each stage has a weight whose gradient calls the hook.
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 1))

    def reach(self, place):
        if place == self.place and self.trainer.rank == self.stage and self.trainer.global_step == self.step:
            self.fault()

    def train_dataloader(self):
        return Batches(self, DataLoader(TensorDataset(torch.randn(24, 5)), batch_size=8))

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 5)), batch_size=8) if self.place == "validation" else None

    def training_step(self, batch, batch_idx):
        self.reach("forward")
        if not self.net[-1].weight._backward_hooks:
            for layer in self.net:
                for weight in layer.parameters():
                    weight.register_hook(lambda gradient: self.reach("backward"))
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.reach("validation")
        return {"mean": self.net(batch[0]).mean()}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.reach("optimizer"))
        return optimizer


class Batches:
    """A user's own loader."""

    def __init__(self, module, loader):
        self.module, self.loader = module, loader

    def __iter__(self):
        for batch in self.loader:
            self.module.reach("loader")
            yield batch


def fails(module, devices, sentence, **options):
    trainer = Trainer(
        gpus=devices, distributed_backend="balanced", accelerator="cpu", micro_batches=2, val_check_interval=1,
        **options,
    )  # fmt: skip
    with pytest.raises(RankError, match=sentence):
        trainer.fit(module)
    assert multiprocessing.active_children() == []


def at_each_place(devices):
    """Each place with each stage; only the first stage draws batches."""
    every = [(place, stage, devices) for place in PLACES for stage in range(devices)]
    return [one for one in every if one[0] != "loader" or one[1] == 0]


@pytest.mark.parametrize(("place", "stage", "devices"), at_each_place(2))
def test_a_stage_that_raises_is_named(place, stage, devices):
    sentence = rf"Rank {stage}, stage {stage} \(net.*\), failed: ValueError: out of paper"
    fails(Failing(raises, place, stage), devices, sentence)


@pytest.mark.parametrize(("place", "stage", "devices"), at_each_place(2))
def test_a_stage_that_dies_is_named(place, stage, devices):
    sentence = rf"Rank {stage}, stage {stage} \(net.*\), ended before its training was complete: .*SIGKILL.*memory"
    fails(Failing(dies, place, stage), devices, sentence)


@pytest.mark.parametrize(("place", "stage", "devices"), at_each_place(3))
def test_a_stage_that_hangs_is_named(place, stage, devices):
    sentence = rf"Stage \d has waited 4 s for .*stage {stage}, on rank {stage}, makes no progress.*stage_timeout"
    fails(Failing(hangs, place, stage), devices, sentence, stage_timeout=4)


def test_a_stage_that_hangs_in_the_last_step_is_named():
    sentence = r"Stage 0 has waited 4 s for .*stage 1, on rank 1, makes no progress"
    fails(Failing(hangs, "optimizer", 1, step=2), 2, sentence, stage_timeout=4)


def test_a_replica_that_hangs_is_named():
    sentence = r"has waited 4 s for .*stage 1, on rank 3, makes no progress"
    fails(Failing(hangs, "optimizer", 3), 4, sentence, stages=2, stage_timeout=4)


def test_what_raises_before_there_are_stages_is_said_of_the_rank():
    class Refusing(Failing):
        def configure_optimizers(self):
            if self.trainer.rank == 1:
                raise ValueError("out of paper")
            return super().configure_optimizers()

    fails(Refusing(), 2, "Rank 1 failed: ValueError: out of paper")
