"""`plumbline check` on a loss in bfloat16 that all ranks compute together from gathered outputs.

Each rank has one backward pass and the same loss, so a simulation of rounding gives one number along each direction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.verdict.verdict import Answer, answer_of
from plumbline.replay.replay_modes import Rounding

STEPS, ROWS, WIDTH, HIDDEN = 4, 8, 16, 32


class Gathered(torch.autograd.Function):
    """The outputs of all ranks; with ``is_reduced``, the backward adds all ranks' gradients for them."""

    @staticmethod
    def forward(context: Any, values: Tensor, is_reduced: bool) -> Tensor:
        context.is_reduced = is_reduced
        every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(every, values.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        if context.is_reduced:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()], None


class Encoder(nn.Module):
    """Its outputs are the deviation and the correlations of features over the rows of all ranks."""

    def __init__(self, norm: type[nn.Module], is_reduced: bool) -> None:
        super().__init__()
        self.is_reduced = is_reduced
        layers: list[nn.Module] = [nn.Linear(WIDTH, HIDDEN)]
        for _ in range(3):
            layers += [norm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)]
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        features = Gathered.apply(self.layers(rows), self.is_reduced)
        features = features - features.mean(0)
        deviation = torch.relu(1 - torch.sqrt(features.float().var(0) + 1e-4)).mean()
        covariance = features.T @ features / (len(features) - 1)
        return deviation, (covariance - torch.diag(torch.diag(covariance))).float().pow(2).sum() / HIDDEN


def train(seed: int, norm: type[nn.Module], is_reduced: bool) -> None:
    torch.manual_seed(seed)
    model = DistributedDataParallel(Encoder(norm, is_reduced))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    weight = 25 if is_reduced else 25 + 10 * dist.get_rank()
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            deviation, correlation = model(torch.randn(ROWS, WIDTH, generator=generator))
            loss = weight * deviation + correlation
        loss.backward()
        optimizer.step()


def answer(plumbline: Any, *scene: Any) -> Answer:
    (training,) = plumbline.check(partial(train, *scene), ranks=2, steps=STEPS).trainings
    found: Answer = answer_of(training)
    return found


@pytest.mark.parametrize(("seed", "norm"), [(53, nn.BatchNorm1d), (66, nn.LayerNorm)])
def test_a_simulation_that_happens_to_round_little_accuses_nobody(plumbline: Any, seed: int, norm: Any) -> None:
    assert answer(plumbline, seed, norm, True) is not Answer.WRONG


@pytest.mark.parametrize(("seed", "norm"), [(10, nn.LayerNorm), (14, nn.LayerNorm)])
def test_a_backward_that_is_not_reduced_is_found_in_spite_of_rounding(plumbline: Any, seed: int, norm: Any) -> None:
    assert answer(plumbline, seed, norm, False) is Answer.WRONG


def test_whole_numbers_and_infinities_are_not_rounded() -> None:
    exact = torch.tensor([0.0, 3.0, -torch.inf, torch.inf], dtype=torch.float64)
    assert torch.equal(Rounding(2.0**-8, 0).of(exact.clone()), exact)
    assert not torch.equal(Rounding(2.0**-8, 0).of(exact + 0.5)[:2], exact[:2] + 0.5)
