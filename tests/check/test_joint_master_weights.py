"""Tensor parallelism whose optimizers step copies of the weights, divided over the ranks of data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from master_copies import Sharded, Whole
from torch import Tensor, nn
from torch.nn import functional

from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on

STEPS, ROWS, WIDTH = 3, 8, 16


class CopiedActivations(torch.autograd.Function):
    """The same activations on every rank of a group: their gradient is the sum over its ranks."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        context.group = group
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class SummedActivations(torch.autograd.Function):
    """The sum of a group's activations: each of its ranks gets the gradient as it is."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Parallel(nn.Module):
    """A layer in two parts between layers that every rank holds whole."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        up, down = torch.randn(2 * WIDTH, WIDTH) / 4, torch.randn(WIDTH, 2 * WIDTH) / 6
        self.up, self.down = (nn.Parameter(one.clone()) for one in (up.chunk(ranks)[rank], down.chunk(ranks, 1)[rank]))
        self.bias = nn.Parameter(torch.zeros(2 * WIDTH // ranks))

    def copied(self, values: Tensor) -> Tensor:
        return CopiedActivations.apply(values, self.group)

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        middle = functional.gelu(functional.linear(self.copied(values), self.up, self.bias))
        return self.last(values + SummedActivations.apply(functional.linear(middle, self.down), self.group))


class Training:
    """A right training; its methods are the places for mistakes."""

    def __init__(self, kind=Sharded, dtype=torch.float32, data=2, scale=1.0, micro_batches=1, limit=None):
        rank, parts = dist.get_rank(), dist.get_world_size() // data
        layers = [dist.new_group([parts * one + each for each in range(parts)]) for one in range(data)]
        replicas = [dist.new_group([parts * each + one for each in range(data)]) for one in range(parts)]
        self.layers, self.replicas, self.samples = layers[rank // parts], replicas[rank % parts], rank // parts
        self.scale, self.micro_batches, self.limit = scale, micro_batches, limit
        self.model = self.made().to(dtype)
        self.optimizer = self.made_optimizer(kind)

    def made_optimizer(self, kind):
        self.copies = kind(list(self.model.parameters()), self.replicas)
        return torch.optim.AdamW(self.copies.masters, lr=1e-2)

    def made(self):
        return Parallel(self.layers)

    def fit(self):
        generator = torch.Generator().manual_seed(self.samples)
        losses = []
        for _ in range(STEPS):
            self.model.zero_grad()
            for _ in range(self.micro_batches):
                rows, targets = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 4))
                outputs = self.model(rows.to(self.model.up.dtype)).float()
                loss = functional.mse_loss(outputs, targets) / self.micro_batches
                (loss * self.scale).backward()
                losses.append(loss.item())
            with torch.no_grad():
                gradients = {name: self.averaged(name, one.grad.float()) for name, one in self.model.named_parameters()}
                factor = self.clipped(gradients)
                self.take_step({name: one * factor for name, one in gradients.items()})
        return losses

    def take_step(self, gradients):
        self.copies.give(list(gradients.values()))
        self.optimizer.step()
        self.copies.take()

    def averaged(self, name, gradient):
        dist.all_reduce(gradient, group=self.replicas)
        return gradient / dist.get_world_size(self.replicas) / self.scale

    def clipped(self, gradients):
        """Return the factor that makes the gradients of the whole model as long as the limit."""
        return 1.0 if self.limit is None else min(1.0, self.limit / float(self.square(gradients).sqrt()))

    def square(self, gradients):
        parts = sum(one.square().sum() for name, one in gradients.items() if "." not in name)
        dist.all_reduce(parts, group=self.layers)
        return parts + sum(one.square().sum() for name, one in gradients.items() if "." in name)


class InTwoSteps(Training):
    """Copies get their gradients in two steps of one optimizer, as DeepSpeed's of experts and of other layers do."""

    def made_optimizer(self, kind):
        named = list(self.model.named_parameters())
        chosen = [[name for name, _ in named if ("." in name) is whole] for whole in (True, False)]
        self.sets = [(names, kind([dict(named)[name] for name in names], self.replicas)) for names in chosen]
        return torch.optim.AdamW([{"params": copies.masters} for _, copies in self.sets], lr=1e-2)

    def take_step(self, gradients):
        groups = self.optimizer.param_groups
        for group, (names, copies) in zip(groups, self.sets, strict=True):
            copies.give([gradients[name] for name in names])
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            self.optimizer.param_groups = groups
            self.optimizer.zero_grad()
        for _, copies in self.sets:
            copies.take()


class TripledInTheSecond(InTwoSteps):
    def averaged(self, name, gradient):
        return super().averaged(name, gradient) * (1 if "." in name else 3)


class InputNotReduced(Training):
    """Ranks do not add up the gradients of what all parts of a layer receive."""

    def made(self):
        model = super().made()
        model.copied = lambda values: values
        return model


class NotReduced(Training):
    def averaged(self, name, gradient):
        return gradient / dist.get_world_size(self.replicas) / self.scale


class Summed(Training):
    def averaged(self, name, gradient):
        return super().averaged(name, gradient) * dist.get_world_size(self.replicas)


class NotScaled(Training):
    """Gradients are divided by a loss scale by which the loss was not multiplied."""

    def averaged(self, name, gradient):
        return super().averaged(name, gradient) / 4096


class Tripled(Training):
    def averaged(self, name, gradient):
        return super().averaged(name, gradient) * (3 if name == "down" else 1)


class OverAllRanks(Training):
    """Parts of layers are averaged with each other."""

    def averaged(self, name, gradient):
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size() / self.scale


class OwnNorm(Training):
    """Each rank clips by the norm of the parts that it holds."""

    def square(self, gradients):
        return sum(one.square().sum() for one in gradients.values())


@pytest.fixture
def judged(plumbline):
    """Return a function that trains on ranks under check, and returns what was found in the training."""

    def judged(training, ranks=4, **options):
        checked = plumbline.check(lambda: training(**options).fit(), ranks=ranks, steps=STEPS)
        assert not any(end.has_failed for end in checked.ends), checked.ends
        (found,) = checked.trainings
        return found

    return judged


RIGHT = {
    "whole copies of one replica": {"kind": Whole, "ranks": 2, "data": 1},
    "whole copies": {"kind": Whole},
    "runs": {"kind": Sharded},
    "runs of a bfloat16 model": {"kind": Sharded, "dtype": torch.bfloat16},
    "a scaled loss": {"kind": Sharded, "micro_batches": 2, "scale": 1024.0},
    "clipping by hand": {"kind": Sharded, "limit": 0.3},
    "clipping by hand of a scaled loss": {"kind": Whole, "limit": 0.3, "scale": 1024.0},
}

WRONG = {
    InputNotReduced: "parts-of-a-sum",
    NotReduced: "not-synchronised",
    Summed: "divided-by-another-count",
    NotScaled: "loss-not-scaled",
    Tripled: "some-tensors-scaled",
    OverAllRanks: "blocks-averaged-with-each-other",
}
WHOLE = {NotReduced: "some-parameters-not-synchronised"}
"""What is named otherwise where each rank holds whole copies."""


@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
def test_copies_of_a_model_in_parts_are_judged_in_full(judged, options):
    training = judged(Training, **options)
    assert answer_of(training) is Answer.RIGHT, (sentence_on(training), training.coverage)
    assert training.coverage.is_joint


@pytest.mark.parametrize("kind", [Whole, Sharded])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_a_mistake_on_the_way_to_copies_of_a_model_in_parts_is_named(judged, wrong, kind):
    training = judged(wrong, kind=kind)
    assert answer_of(training) is Answer.WRONG
    bad = [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]
    named = {one.cause for one in bad if one.check == "gradients"}
    assert named == {WHOLE.get(wrong, WRONG[wrong]) if kind is Whole else WRONG[wrong]}


@pytest.mark.parametrize("options", [{}, {"limit": 0.3}, {"dtype": torch.bfloat16, "scale": 1024.0}])
def test_copies_that_get_their_gradients_one_after_the_other_are_judged_in_full(judged, options):
    training = judged(InTwoSteps, **options)
    assert answer_of(training) is Answer.RIGHT, (sentence_on(training), training.coverage)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_gradients_of_a_later_step_are_not_only_longer(judged, limit):
    training = judged(TripledInTheSecond, limit=limit)
    assert answer_of(training) is Answer.WRONG
    assert "some tensors scaled" in sentence_on(training)


def test_parts_that_are_clipped_by_their_own_norms_are_wrong(judged):
    assert answer_of(judged(OwnNorm, limit=0.3)) is Answer.WRONG


def test_one_step_that_is_shorter_may_have_been_clipped(plumbline):
    checked = plumbline.check(lambda: Training(limit=0.3).fit(), ranks=4, steps=1)
    assert answer_of(checked.trainings[0]) is Answer.NOT_JUDGED
