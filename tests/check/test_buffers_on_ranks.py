"""Buffers that DistributedDataParallel broadcasts, and that a module changes several times in one forward."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoViews(nn.Module):
    """Calls its only child twice, as in self-supervised training, and compares the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, rows):
        one, other = self.encoder(rows), self.encoder(rows + 1)
        spread = torch.cat(with_gradients.all_gather(one)).std(0)
        return (one - other).square().mean() + (1 - spread).square().sum()


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoViews())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).backward()
        optimizer.step()


def test_buffers_that_change_within_a_forward_are_no_mistake(plumbline):
    (one,) = plumbline.check(train, ranks=2, steps=2).trainings
    assert [finding for finding in one.findings if finding.outcome.is_bad] == []
    (buffers,) = (finding for finding in one.findings if finding.check == "buffers")
    assert "begin 2 forwards with the same buffers" in buffers.message
