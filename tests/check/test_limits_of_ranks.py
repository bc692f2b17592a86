"""Ranks that clip the same gradient to different limits."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.function import check_function


def train(wrap, limit):
    torch.manual_seed(0)
    model = wrap(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank() if wrap is DistributedDataParallel else 0)
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit(dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()


def causes(wrap, limit):
    checked = check_function(lambda: train(wrap, limit), 2, steps=3)
    return [one.cause for one in checked.findings if one.outcome.is_bad and one.check == "clipping"]


def test_other_limits_for_one_gradient_are_wrong():
    assert causes(DistributedDataParallel, lambda rank: 0.01 * (1 + rank)) == ["clipped-to-another-length"]


def test_equal_limits_and_models_of_their_own_are_not_accused():
    assert not causes(DistributedDataParallel, lambda rank: 0.01)
    assert not causes(lambda model: model, lambda rank: 0.01 * (1 + rank))
