"""Backward passes to inputs, and passes whose gradients the script does not use for the step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.verdict.verdict import Answer, answer_of

STEPS = 4


class Training:
    """Two ranks with ``DistributedDataParallel``; each rank draws its own rows."""

    def __init__(self, rate: float = 1e-2) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.model = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.Adam(self.model.parameters(), rate)
        torch.manual_seed(1 + dist.get_rank())

    def loss(self, rows=None, labels=None):
        rows = torch.randn(8, 3) if rows is None else rows
        labels = torch.randint(2, (8,)) if labels is None else labels
        return functional.cross_entropy(self.model(rows), labels)

    def residual(self, weights=1.0):
        rows = torch.rand(8, 3).requires_grad_()
        values = self.model(rows).sum(1)
        (slopes,) = torch.autograd.grad(values.sum(), rows, create_graph=True)
        return (weights * (slopes.sum(1) - values).square()).mean()


def physics(*, synchronised=True):
    """A loss with derivatives with respect to inputs; these are leaves, like a stage's received activations."""
    own = Training()
    for _ in range(STEPS):
        own.optimizer.zero_grad()
        own.loss().backward()
        if synchronised:
            own.residual().backward()
        else:
            with own.model.no_sync():
                own.residual().backward()
        own.optimizer.step()


def adversarial(*, through_leaf=True):
    own = Training()
    for _ in range(STEPS):
        rows, labels = torch.randn(8, 3), torch.randint(2, (8,))
        change = torch.zeros_like(rows, requires_grad=True)
        if through_leaf:
            rows.requires_grad_()
        own.loss(rows if through_leaf else rows + change, labels).backward()
        slope = rows.grad if through_leaf else change.grad
        own.optimizer.zero_grad()
        own.loss(rows.detach() + 0.1 * slope.sign(), labels).backward()
        own.optimizer.step()
        own.optimizer.zero_grad()


def curvature():
    """Every second step, another pass estimates the importance of each weight."""
    own, importance = Training(), torch.zeros(())
    for step in range(STEPS):
        if step % 2:
            own.loss().backward()
            importance = importance + sum(one.grad.square().sum() for one in own.network.parameters())
        own.optimizer.zero_grad()
        own.loss().backward()
        own.optimizer.step()
        own.optimizer.zero_grad()


def short_windows():
    """Zeroes gradients before each micro-batch; every second step has only one."""
    own = Training()
    for step in range(STEPS):
        count = 1 if step % 2 else 3
        for _ in range(count):
            own.optimizer.zero_grad()
            (own.loss() / count).backward()
        own.optimizer.step()


def lost(*, of_inputs):
    """Zeroes the gradients of the first loss by mistake."""
    own = Training()
    for _ in range(STEPS):
        own.optimizer.zero_grad()
        (own.residual() if of_inputs else own.loss()).backward()
        own.optimizer.zero_grad()
        own.loss().backward()
        own.optimizer.step()


def two_frequencies():
    """One optimizer steps half as often as the other, with the gradients of two passes."""
    own = Training()
    often = torch.optim.SGD(own.network[0].parameters(), 0.1)
    seldom = torch.optim.Adam(own.network[2].parameters(), 1e-2)
    for step in range(2 * STEPS):
        own.loss().backward()
        often.step()
        often.zero_grad()
        if step % 2:
            seldom.step()
            seldom.zero_grad()


class Critic(nn.Module):
    """Compares each row with the mean over all ranks' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, rows):
        features = self.first(rows).tanh()
        return self.last(features - with_gradients.all_reduce(features.mean(0)) / dist.get_world_size())


def taking_turns(*, zeroes=True):
    """The critic's own passes follow the generator's, which leave gradients in the critic."""
    own, critic = Training(), Critic()
    judge = DistributedDataParallel(critic)
    other = torch.optim.Adam(judge.parameters(), 1e-2)
    for _ in range(STEPS):
        made = functional.pad(own.model(torch.randn(8, 3)), (0, 1))
        if zeroes:
            other.zero_grad()
        (judge(made.detach()).square() - judge(torch.randn(8, 3))).mean().backward()
        other.step()
        own.optimizer.zero_grad()
        critic(made).exp().mean().backward()
        own.optimizer.step()


def weights_of_own_points(*, starts_alike=False):
    """Each rank trains the weights of its own points, to increase the loss."""
    own = Training()
    weights = nn.Parameter(torch.ones(8) if starts_alike else torch.rand(8))
    other = torch.optim.Adam([weights], 1e-2, maximize=True)
    for _ in range(STEPS):
        own.optimizer.zero_grad()
        other.zero_grad()
        own.residual(weights).backward()
        own.optimizer.step()
        other.step()


def checked(plumbline, train, **settings):
    (one,) = plumbline.check(lambda: train(**settings), ranks=2, steps=STEPS).trainings
    return one


def cause(one):
    return next((finding.cause for finding in one.findings if finding.outcome.is_bad), None)


@pytest.mark.parametrize("train", [physics, adversarial, two_frequencies], ids=lambda train: train.__name__)
def test_it_is_right_and_wholly_compared(plumbline, train):
    one = checked(plumbline, train)
    assert cause(one) is None
    assert answer_of(one) is Answer.RIGHT


@pytest.mark.parametrize("train", [adversarial, curvature], ids=lambda train: train.__name__)
def test_gradients_that_are_discarded_on_purpose_are_told(plumbline, train):
    one = checked(plumbline, train, **({"through_leaf": False} if train is adversarial else {}))
    assert answer_of(one) is Answer.RIGHT
    assert any("discards the gradients of some backward passes" in finding.message for finding in one.findings)


@pytest.mark.parametrize("of_inputs", [True, False], ids=["of second order", "of weights"])
def test_gradients_that_are_zeroed_too_early_are_found(plumbline, of_inputs):
    assert cause(checked(plumbline, lost, of_inputs=of_inputs)) == "only-last-micro-batch"


def test_gradients_that_are_zeroed_in_longer_windows_only_are_found(plumbline):
    assert cause(checked(plumbline, short_windows)) == "only-last-micro-batch"


def test_optimizers_that_take_turns_are_judged_by_their_own_passes(plumbline):
    assert answer_of(checked(plumbline, taking_turns)) is Answer.RIGHT
    assert cause(checked(plumbline, taking_turns, zeroes=False)) == "exchanged-otherwise"


def test_gradients_of_a_physical_loss_that_are_not_averaged_are_found(plumbline):
    assert cause(checked(plumbline, physics, synchronised=False)) == "some-micro-batches-not-synchronised"


def test_own_values_of_ranks_are_not_judged_but_copies_are(plumbline):
    one = checked(plumbline, weights_of_own_points)
    assert answer_of(one) is Answer.RIGHT_IN_PART
    (group,) = one.coverage.gradients.left_out
    assert group.why.startswith("no module holds it")
    assert cause(checked(plumbline, weights_of_own_points, starts_alike=True)) == "not-synchronised"
