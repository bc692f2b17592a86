"""Tensor parallelism with optimizers that step copies of the weights, sharded over data-parallel ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from joint_pipelines import Received, Sent
from master_copies import Sharded, Whole
from rank_scenes import CopiedActivations, SummedActivations
from torch import Tensor, nn
from torch.nn import functional

from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on

STEPS, ROWS, WIDTH = 3, 8, 16


class Parallel(nn.Module):
    """A layer in two parts, between replicated layers."""

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
    """A right training; mistakes override its methods."""

    def __init__(self, kind=Sharded, dtype=torch.float32, data=2, scale=1.0, micro_batches=1, limit=None, steps=STEPS):
        rank, parts = dist.get_rank(), dist.get_world_size() // data
        layers = [dist.new_group([parts * one + each for each in range(parts)]) for one in range(data)]
        replicas = [dist.new_group([parts * each + one for each in range(data)]) for one in range(parts)]
        self.layers, self.replicas, self.samples = layers[rank // parts], replicas[rank % parts], rank // parts
        self.scale, self.micro_batches, self.limit, self.steps = scale, micro_batches, limit, steps
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
        for _ in range(self.steps):
            self.model.zero_grad()
            for _ in range(self.micro_batches):
                rows, targets = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 4))
                loss = self.loss(rows.to(next(self.model.parameters()).dtype), targets) / self.micro_batches
                self.backward(loss * self.scale)
                losses.append(loss.item())
            with torch.no_grad():
                gradients = {name: self.averaged(name, one.grad.float()) for name, one in self.model.named_parameters()}
                factor = self.clipped(gradients)
                self.take_step({name: one * factor for name, one in gradients.items()})
        return losses

    def loss(self, rows, targets):
        return functional.mse_loss(self.model(rows).float(), targets)

    def backward(self, loss):
        loss.backward()

    def take_step(self, gradients):
        self.copies.give(list(gradients.values()))
        self.optimizer.step()
        self.copies.take()

    def averaged(self, name, gradient):
        dist.all_reduce(gradient, group=self.replicas)
        return gradient / dist.get_world_size(self.replicas) / self.scale

    def clipped(self, gradients):
        """Return the factor that scales the whole model's gradients to the limit."""
        return 1.0 if self.limit is None else min(1.0, self.limit / float(self.square(gradients).sqrt()))

    def square(self, gradients):
        parts = sum(one.square().sum() for name, one in gradients.items() if "." not in name)
        dist.all_reduce(parts, group=self.layers)
        return parts + sum(one.square().sum() for name, one in gradients.items() if "." in name)


class Stage(nn.Module):
    """One of two stages on a group's ranks: both use the same parameter names, with different shapes."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.rank, self.other = dist.get_rank(group), dist.get_global_rank(group, 1 - dist.get_rank(group))
        torch.manual_seed(self.rank)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, (WIDTH, 4)[self.rank])

    def forward(self, rows: Tensor) -> Tensor:
        if self.rank == 1:
            rows = Received.apply(rows.new_zeros((), requires_grad=True), rows.shape, self.other)
        outputs = self.last(functional.gelu(self.first(rows)))
        return Sent.apply(outputs, self.other) if self.rank == 0 else outputs


class InStages(Training):
    def made(self):
        return Stage(self.layers)

    def loss(self, rows, targets):
        return super().loss(rows, targets) if self.model.rank == 1 else self.model(rows)

    def square(self, gradients):
        square = sum(one.square().sum() for one in gradients.values())
        dist.all_reduce(square, group=self.layers)
        return square


class SetAsAttribute(nn.Module):
    """A stage that reads its received input from an attribute, where Megatron's schedules put it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage, self.received = stage, None

    def forward(self, rows: Tensor) -> Tensor:
        return self.stage.last(functional.gelu(self.stage.first(rows if self.received is None else self.received)))


class BySchedule(InStages):
    """Stages whose schedule sends activations, and whose backwards start at received gradients."""

    def made(self):
        return SetAsAttribute(Stage(self.layers))

    def backward(self, loss):
        if self.model.stage.rank == 1:
            super().backward(loss)
            dist.send(self.model.received.grad, self.model.stage.other)
        else:
            gradient = torch.empty_like(self.sent)
            dist.recv(gradient, self.model.stage.other)
            self.sent.backward(gradient)

    def loss(self, rows, targets):
        if self.model.stage.rank == 0:
            self.sent = self.model(rows)
            dist.send(self.sent.detach(), self.model.stage.other)
            return torch.zeros(())
        self.model.received = torch.empty_like(rows)
        dist.recv(self.model.received, self.model.stage.other)
        self.model.received.requires_grad_()
        return functional.mse_loss(self.model(rows).float(), targets)


class TiedStage(Stage):
    """The first layer of the first stage and a layer of the second share a weight."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        torch.manual_seed(7)
        shared = nn.Linear(WIDTH, WIDTH, bias=False)
        if self.rank == 0:
            self.first = nn.Sequential(shared, self.first)
        else:
            self.last = nn.Sequential(shared, self.last)


class Tied(InStages):
    def made(self):
        return TiedStage(self.layers)

    def averaged(self, name, gradient):
        if name == ("first.0.weight", "last.0.weight")[self.model.rank]:
            dist.all_reduce(gradient, group=self.layers)
        return super().averaged(name, gradient)


class SummedInStages(InStages):
    def averaged(self, name, gradient):
        return super().averaged(name, gradient) * 2


class OneStageTripled(InStages):
    def averaged(self, name, gradient):
        return super().averaged(name, gradient) * (3 if self.model.rank == 0 else 1)


class InTwoSteps(Training):
    """Copies get their gradients in two steps of one optimizer, like DeepSpeed's for experts and other layers."""

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
    """Does not sum the gradients of a divided layer's input over the ranks."""

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
    """Divides gradients by a loss scale, but does not multiply the loss by it."""

    def averaged(self, name, gradient):
        return super().averaged(name, gradient) / 4096


class Tripled(Training):
    def averaged(self, name, gradient):
        return super().averaged(name, gradient) * (3 if name == "down" else 1)


class OverAllRanks(Training):
    """Averages parts of layers with each other."""

    def averaged(self, name, gradient):
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size() / self.scale


class OwnNorm(Training):
    """Each rank clips by the norm of its own parts."""

    def square(self, gradients):
        return sum(one.square().sum() for one in gradients.values())


@pytest.fixture
def judged(plumbline):
    """Return a function that trains on ranks under check, and returns the findings."""

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
"""Mistakes that have another name if each rank has whole copies."""


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


@pytest.mark.parametrize(
    "options", [{"kind": Whole}, {}, {"limit": 0.3}, {"dtype": torch.bfloat16, "micro_batches": 2, "scale": 1024.0}]
)
def test_copies_of_a_pipelines_stages_are_judged_in_full(judged, options):
    training = judged(InStages, **options)
    assert answer_of(training) is Answer.RIGHT, (sentence_on(training), training.coverage)
    assert training.coverage.is_joint


@pytest.mark.parametrize("kind", [Whole, Sharded])
@pytest.mark.parametrize("training", [BySchedule, Tied])
def test_copies_of_other_pipelines_are_judged_in_full(judged, training, kind):
    found = judged(training, kind=kind, micro_batches=2)
    assert answer_of(found) is Answer.RIGHT, (sentence_on(found), found.coverage)
    assert found.coverage.is_joint


@pytest.mark.parametrize(
    ("wrong", "named"), [(SummedInStages, "summed over ranks"), (OneStageTripled, "some tensors scaled")]
)
def test_a_mistake_in_copies_of_a_pipelines_stages_is_named(judged, wrong, named):
    training = judged(wrong)
    assert answer_of(training) is Answer.WRONG
    assert named in sentence_on(training)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_gradients_of_a_later_step_are_not_only_longer(judged, limit):
    training = judged(TripledInTheSecond, limit=limit)
    assert answer_of(training) is Answer.WRONG
    assert "some tensors scaled" in sentence_on(training)


def test_a_direction_that_hardly_shows_the_gradients_does_not_say_that_they_have_no_factor(plumbline):
    def train():
        Training(Sharded, dtype=torch.bfloat16, limit=0.3, steps=8).fit()

    (training,) = plumbline.check(train, ranks=4, steps=8).trainings
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)


@pytest.mark.parametrize("kind", [Whole, Sharded])
def test_clipping_by_the_norm_of_a_ranks_own_parts_is_named(judged, kind):
    training = judged(OwnNorm, kind=kind, limit=0.3)
    assert answer_of(training) is Answer.WRONG
    assert "clipped shard by shard" in sentence_on(training)


class PartsScaled(OwnNorm):
    """A layer's ranks scale their parts by different factors, unrelated to any norm."""

    def clipped(self, gradients):
        return (0.5, 0.25)[dist.get_rank(self.layers)]


def test_parts_that_are_scaled_by_factors_of_their_own_were_not_clipped(judged):
    training = judged(PartsScaled)
    assert answer_of(training) is Answer.WRONG
    assert "clipped" not in sentence_on(training)


def test_one_step_that_is_shorter_may_have_been_clipped(plumbline):
    checked = plumbline.check(lambda: Training(limit=0.3).fit(), ranks=4, steps=1)
    assert answer_of(checked.trainings[0]) is Answer.NOT_JUDGED
