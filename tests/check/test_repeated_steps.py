"""Only steps that may show something new are recomputed in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replaying import recording
from torch import Tensor, nn

from plumbline.check.evidence.training import REPEATS
from plumbline.check.judge.judged_gradients import received_gradients
from plumbline.check.judge.received_gradient import ReceivedGradient
from plumbline.check.rank.optimizer.state_continuity import is_any
from plumbline.core.outcome import Outcome
from plumbline.judge.truth import RIGHT

COUNT = itertools.count(1)


class Doubled(torch.autograd.Function):
    """A function whose backward is Python code."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return 2 * given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Net(nn.Module):
    """Two layers, whose result is doubled by custom code, or differs each time on request."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.layer, self.last, self.kind = nn.Linear(3, 2), nn.Linear(2, 2), kind

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = self.last(self.layer(given))
        if self.kind == "own code":
            made = Doubled.apply(made)
        return made * next(COUNT) if self.kind == "not repeatable" else made


def repeats(net: Net, *, enabled: bool = False, change: str = "", **options: Any) -> list[bool]:
    """Return, for two steps, whether the second is not recomputed. ``change`` runs before the second step."""
    found: list[bool] = []
    with recording() as recorded:
        for step in range(2):
            if step and change == "evaluates":
                net.eval()
            elif step and change == "frozen":
                net.layer.bias.requires_grad_(False)
            elif step and change == "own code":
                net.kind = change
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(step) and change == "autocast"):
                made = net(torch.randn(4, 3))
            loss = made.float().square().sum() + (net.layer.bias.sum() if step and change == "outside" else 0)
            recorded.backward(loss)
            if step and change == "written":
                net.layer.weight.data.mul_(2)
                net.layer.weight.data = net.layer.weight.data.clone()
            given = {name: one[step] for name, one in options.items()}
            (one,) = recorded.exact(**({"kind": "a step"} | given)).values()
            assert one.repeats or one.gradients or one.uncovered
            found.append(one.repeats)
    return found


def test_a_step_like_an_earlier_one_is_not_recomputed() -> None:
    assert repeats(Net()) == [False, True]


@pytest.mark.parametrize("change", ["evaluates", "frozen", "own code", "autocast", "outside", "written"])
def test_a_step_that_differs_in_kind_is_recomputed(change: str) -> None:
    assert repeats(Net(), change=change) == [False, False]


def test_a_step_is_recomputed_for_each_optimizer_and_where_a_question_asks_for_every_step() -> None:
    assert repeats(Net(), kind=["one", "other"]) == [False, False]
    assert repeats(Net(), kind=[None, None]) == [False, False]
    assert repeats(Net(), recomputed_otherwise=[False, True]) == [False, False]


def test_steps_that_cannot_be_recomputed_are_tried_again() -> None:
    assert repeats(Net("not repeatable")) == [False, False]


def test_own_code_in_a_backward_pass_counts_as_the_same_only_if_it_communicates_as_often() -> None:
    assert repeats(Net("own code"), sent=[1, 1]) == [False, True]
    assert repeats(Net("own code"), sent=[1, 2]) == [False, False]
    assert repeats(Net(), sent=[1, 2]) == [False, True]  # the wrapper rebuilds its buckets


def exchanges_later(where: str) -> None:
    """Average gradients over ranks in a layer, or average its outputs, from the second step on."""
    taken: list[bool] = []

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:
            given = given.clone()
            if taken and where == "forward":
                dist.all_reduce(given)
            return given

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            if taken and where == "backward":
                dist.all_reduce(gradient)
            return gradient

    class Exchanging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, given: Tensor) -> Tensor:
            made: Tensor = self.second(Exchanged.apply(torch.tanh(self.first(given))))
            return made

    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(Exchanging())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    own = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=own)).square().mean().backward()
        optimizer.step()
        taken.append(True)


@pytest.mark.parametrize(
    ("where", "cause"), [("forward", "some-tensors-averaged-twice"), ("backward", "exchanged-otherwise")]
)
def test_ranks_that_exchange_only_in_later_steps_are_noticed(plumbline: Any, where: str, cause: str) -> None:
    checked = plumbline.check(lambda: exchanges_later(where), ranks=2, steps=3)
    (wrong,) = [one for one in checked.findings if one.outcome is Outcome.FAILED]
    assert (wrong.check, wrong.cause, wrong.step) == ("gradients", cause, 1)


def cases_of(checked: Any) -> list[ReceivedGradient]:
    return received_gradients(checked.trainings[0].training)


@pytest.mark.parametrize("mistaken", [False, True])
def test_noise_is_that_of_the_last_recomputed_step(plumbline: Any, mistaken: bool) -> None:
    def train() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 3))
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(32, 64)).square().mean().backward()
            if mistaken and step == 2:
                for one in net.parameters():
                    assert one.grad is not None
                    one.grad *= 2
            optimizer.step()

    checked = plumbline.check(train, ranks=1, steps=4)
    assert checked.trainings[0].coverage.replays.part == 1
    assert checked.trainings[0].coverage.repeats
    first, *others = cases_of(checked)
    assert [REPEATS in case.step.passes[0].facts for case in (first, *others)] == [False, True, True, True]
    noise = [case.in_noise(RIGHT, 1.0) for case in (first, *others)]
    assert all(one is not None for one in noise)
    if not mistaken:
        checked.assert_right()
        assert all(one.is_right for one in noise)
        return
    sizes = [float(case.norms(case.value(RIGHT)).norm()) for case in (first, others[1])]
    assert noise[2].x_noise > 1e4
    # Twice the gradient has an error of one gradient, in multiples of the first step's noise.
    apart = float(case_noise(first).norm()) / sizes[0]
    assert noise[2].x_noise == pytest.approx(1 / apart, rel=0.3)


def case_noise(case: ReceivedGradient) -> Tensor:
    exact = case.exact(RIGHT)
    assert exact is not None
    return case.norms(case.value(RIGHT) - exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("entries", [[0, 0], [0, 1], [-1, 0], [float("nan"), 0]])
def test_a_state_is_any_if_it_has_an_entry_that_is_not_zero(dtype: torch.dtype, entries: list[float]) -> None:
    state = torch.tensor(entries).to(dtype)
    assert is_any(state) == bool(state.any())
