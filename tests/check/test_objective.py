"""The weight of each loss term is read from the loss's gradient, whatever the script does with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.objective import ObjectiveObserver
from plumbline.recording.parameters import ParameterNames
from plumbline.recording.pause import paused, rehearsal

SCORES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, -100, 3, -100, 2])


@pytest.fixture
def observer() -> Iterator[ObjectiveObserver]:
    """An observer whose patches are undone afterwards."""
    names = [name for name in dir(functional) if name.endswith(("loss", "entropy", "logits", "div"))]
    kept = {name: getattr(functional, name) for name in names}
    script = torch.jit.script
    made = ObjectiveObserver(ParameterNames())
    made.install()
    made.start()
    yield made
    torch.jit.script = script
    for name, function in kept.items():
        setattr(functional, name, function)


def noted(observer: ObjectiveObserver, loss: Callable[[Tensor], Tensor]) -> Facts:
    root = loss(SCORES.clone().requires_grad_())
    if observer.attends:
        observer.backward_begins(0, [root])
    root.backward()
    return observer.backward_ends(0) or {}


CASES: list[tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = [
    (lambda s: functional.cross_entropy(s, TARGETS), {"terms": 4, "weight": 1.0}),
    (lambda s: functional.cross_entropy(s, TARGETS) / 8, {"terms": 4, "weight": 0.125}),
    (lambda s: nn.CrossEntropyLoss()(s, TARGETS) * 1024, {"terms": 4, "weight": 1024.0}),
    (lambda s: functional.cross_entropy(s, TARGETS, reduction="sum") / 4, {"terms": 4, "weight": 1.0}),
    (lambda s: functional.cross_entropy(s, TARGETS, reduction="none").sum() / 4, {"terms": 4, "weight": 1.0}),
    (lambda s: functional.cross_entropy(s, s.detach().softmax(1)), {"terms": 6, "weight": 1.0}),
    (lambda s: functional.nll_loss(s.log_softmax(1), TARGETS.abs() % 4), {"terms": 6, "weight": 1.0}),
    (lambda s: functional.mse_loss(s, torch.zeros(6, 4)), {"terms": 24, "weight": 1.0}),
    (lambda s: functional.l1_loss(s, torch.zeros(6, 4), reduction="sum"), {"terms": 24, "weight": 24.0}),
    (lambda s: functional.kl_div(s, torch.ones(6, 4), reduction="batchmean"), {"terms": 6, "weight": 1.0}),
    (lambda s: functional.binary_cross_entropy_with_logits(s, torch.ones(6, 4)), {"terms": 24, "weight": 1.0}),
    (lambda s: functional.huber_loss(s, torch.zeros(6, 4)) * 0.5, {"terms": 24, "weight": 0.5}),
    (
        lambda s: nn.CTCLoss()(s.log_softmax(1).view(3, 2, 4), torch.tensor([1, 2, 3]), (3, 3), (2, 1)) / 2,
        {"terms": 2, "weight": 0.5},
    ),
    (lambda s: functional.triplet_margin_loss(s, s.flip(1), s.detach() + 1), {"terms": 6, "weight": 1.0}),
    (lambda s: functional.cosine_embedding_loss(s, s.flip(1), torch.ones(6)), {"terms": 6, "weight": 1.0}),
    (lambda s: functional.gaussian_nll_loss(s, s.detach(), s.exp(), reduction="sum"), {"terms": 24, "weight": 24.0}),
]


@pytest.mark.parametrize("place", range(len(CASES)))
def test_terms_and_weight(observer: ObjectiveObserver, place: int) -> None:
    loss, expected = CASES[place]
    facts = noted(observer, loss)
    (call,) = facts["calls"]
    assert {name: call[name] for name in expected} == pytest.approx(expected)
    assert call["even"]


WEIGHT = torch.tensor([1.0, 1, 0, 1, 0, 1])

BY_HAND: list[tuple[Callable[[Tensor], Tensor], Any]] = [
    (lambda s: s.square().mean(), [[1.0]]),
    (lambda s: s.square().mean() / 4, [[0.25]]),
    (lambda s: (s.square() / 4).mean() * 2, [[0.5]]),
    (lambda s: -s.log_softmax(1)[range(6), TARGETS.abs() % 4].mean(), [[1.0]]),
    (lambda s: s.square().sum() / 6, [[1.0, 4.0]]),
    (lambda s: (s.square().sum(1) * WEIGHT).sum() / WEIGHT.sum(), [[1.0, 1.5]]),
    (lambda s: s.square().mean() + 0.1 * s.abs().mean(), [[1.0], [0.1]]),
    (lambda s: functional.cross_entropy(s, TARGETS) * torch.tensor(1024.0), [[1024.0]]),
    (lambda s: functional.mse_loss(2 * s, torch.zeros(6, 4)), [[1.0]]),
    (lambda s: s.square().mean() / s.std(), None),
    (lambda s: s.square().mul(torch.rand(6, 4)).mean(), None),
    (lambda s: torch.stack([s.mean() / 4, s.mean() / 4]).mean(), None),
    (lambda s: s.norm(), None),
]


@pytest.mark.parametrize("place", range(len(BY_HAND)))
def test_the_weight_of_a_mean_is_read_off_the_graph_of_any_loss(observer: ObjectiveObserver, place: int) -> None:
    loss, expected = BY_HAND[place]
    means = noted(observer, loss).get("means")
    assert (means is None) == (expected is None)
    assert expected is None or [pytest.approx(one) for one in expected] == means


def test_class_weights_count() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    from plumbline.check.rank.observers.loss_functions import describe

    call = describe("cross_entropy", functional.cross_entropy, (SCORES, TARGETS, weight), {})
    assert call.terms == 10.0


def test_a_division_in_place_keeps_the_weight(observer: ObjectiveObserver) -> None:
    def loss(scores: Tensor) -> Tensor:
        result = functional.cross_entropy(scores, TARGETS)
        result /= 4
        return result

    (call,) = noted(observer, loss)["calls"]
    assert call["weight"] == 0.25


def test_uneven_weights_are_known(observer: ObjectiveObserver) -> None:
    shares = torch.tensor([1.0, 2, 0, 1, 0, 1])
    (call,) = noted(observer, lambda s: (functional.cross_entropy(s, TARGETS, reduction="none") * shares).sum())[
        "calls"
    ]
    assert (call["weight"], call["even"]) == (5.0, False)


def test_a_loss_that_is_not_differentiated_does_not_count(observer: ObjectiveObserver) -> None:
    def loss(scores: Tensor) -> Tensor:
        functional.mse_loss(scores, torch.zeros(6, 4))
        return functional.cross_entropy(scores, TARGETS)

    facts = noted(observer, loss)
    assert [call["function"] for call in facts["calls"]] == ["cross_entropy"]
    assert facts["alone"]


def test_losses_wait_for_their_gradients_in_the_order_of_their_calls(observer: ObjectiveObserver) -> None:
    scores = SCORES.clone().requires_grad_()
    losses = [functional.cross_entropy(scores, TARGETS) / number for number in (1, 2, 4)]
    weights = [noted(observer, lambda _, one=one: one)["calls"][0]["weight"] for one in losses]
    assert weights == [1.0, 0.5, 0.25]


def test_a_loss_for_a_log_keeps_no_memory_until_the_step(observer: ObjectiveObserver) -> None:
    class Followed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor) -> Tensor:
            alive.add(ctx)
            return scores.clone()

    def logged_too(scores: Tensor) -> Tensor:
        loss = functional.cross_entropy(scores, TARGETS)
        functional.mse_loss(Followed.apply(scores), torch.zeros(6, 4))
        return loss

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(4):
        noted(observer, logged_too)
    assert len(alive) == 1


def test_a_loss_with_something_added_is_not_alone(observer: ObjectiveObserver) -> None:
    assert not noted(observer, lambda s: functional.cross_entropy(s, TARGETS) + s.square().mean())["alone"]


def test_nothing_is_noted_in_a_replay_or_after_the_end(observer: ObjectiveObserver) -> None:
    with paused():
        assert noted(observer, lambda s: functional.cross_entropy(s, TARGETS)) == {}
    observer.stop()
    assert noted(observer, lambda s: functional.cross_entropy(s, TARGETS)) == {}


def test_results_have_the_bits_that_they_had(observer: ObjectiveObserver) -> None:
    followed = functional.cross_entropy(SCORES.clone().requires_grad_(), TARGETS)
    observer.stop()
    assert torch.equal(followed, functional.cross_entropy(SCORES, TARGETS))


def test_scripted_functions_still_compile(observer: ObjectiveObserver) -> None:
    scripted = torch.jit.script(_scripted)
    assert float(scripted(SCORES, TARGETS)) == float(functional.cross_entropy(SCORES, TARGETS))
    assert functional.cross_entropy.__wrapped__ is not None


def _scripted(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets)


def test_a_loss_of_a_rehearsal_is_none_of_the_training(observer: ObjectiveObserver) -> None:
    def loss(scores: Tensor) -> Tensor:
        with rehearsal():
            rehearsed = functional.cross_entropy(scores, TARGETS)
            torch.autograd.grad(rehearsed, scores)
        return functional.cross_entropy(scores, TARGETS)

    assert len(noted(observer, loss)["calls"]) == 1
