"""Workloads that no trainer is asked about, but that the judge must not be misled by."""

from __future__ import annotations

import torch
from torch import nn

from plumbline.workloads.basics import Mlp, Perceptron


class MuonMlp(Mlp):
    """A perceptron of matrices alone, which Muon orthogonalises in bfloat16."""

    name = "muon"
    exposes = "updates accused that differ by the order in which shards of a matrix are multiplied and added"

    def build(self) -> nn.Module:
        """Return 16 → 96 → 8, without biases."""
        return Perceptron(nn.Linear(16, 96, bias=False), nn.Tanh(), nn.Linear(96, 8, bias=False))

    def optimizer(self, params):
        """Return Muon."""
        return torch.optim.Muon(params, lr=0.02)
