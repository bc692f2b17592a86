"""Samples in the order of the dataset."""

from __future__ import annotations

from harness.workloads.mlp import Mlp


class Sequential(Mlp):
    """The perceptron without shuffling."""

    name = "sequential"
    exposes = "shuffling that nobody asked for, contiguous shards in the place of interleaved ones"
    narrow = True
    precisions = ("32",)
    shuffle = False
    needs_epochs = "asks for the order of an epoch"
