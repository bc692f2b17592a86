"""Clipping: when, of what and to what; right ways pass, and each wrong one is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observed_steps import loss_of, recorded, recorded_on_ranks, small_model
from torch import nn

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.clipping import judge_clipping
from plumbline.check.rank.optimizer.clipping import ClippingObserver
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.recording.parameters import parameters_of

NORM = torch.nn.utils.clip_grad_norm_


def findings(training: RecordedTraining) -> list[Finding]:
    return list(judge_clipping(training))


def causes(training: RecordedTraining) -> list[str | None]:
    return [finding.cause for finding in findings(training) if finding.outcome.is_bad]


def trained(
    between: Callable[[nn.Module], object], *, micro_batches: int = 1, steps: int = 2, after: bool = False
) -> RecordedTraining:
    """Train; call ``between`` before, or ``after`` after, each optimizer step."""

    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(micro_batches):
                loss_of(model, 10 * step + part).backward()
            if not after:
                between(model)
            optimizer.step()
            if after:
                between(model)

    return recorded(script)


def _with_norm_of_all(model: nn.Module) -> None:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)


def _by_hand(model: nn.Module) -> None:
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    for p in model.parameters():
        p.grad *= min(1, 0.5 / norm)


def _with_norm_over_more(model: nn.Module) -> None:
    """Clip by a larger norm than the model's, like a pipeline stage with a part of the model."""
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, torch.tensor(1e3))


CORRECT: dict[str, Callable[[nn.Module], object]] = {
    "by name": lambda model: NORM(model.parameters(), 0.5),
    "by module": lambda model: torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=0.5),
    "by the norm": _with_norm_of_all,
    "by the norm of more": _with_norm_over_more,
    "by another norm": lambda model: NORM(model.parameters(), 0.5, norm_type=1.0),
    "by the largest": lambda model: NORM(model.parameters(), 0.01, math.inf),
    "by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "by hand": _by_hand,
    "only for its norm": lambda model: NORM(model.parameters(), math.inf),
    "a part": lambda model: NORM(model.parameters(), 0.1),
}  # fmt: skip


@pytest.mark.parametrize("how", CORRECT)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_nothing_is_found_wrong_with_clipping(how, micro_batches):
    found = findings(trained(CORRECT[how], micro_batches=micro_batches))
    assert {finding.outcome for finding in found} <= {Outcome.PASSED}


def test_nobody_clips_and_nothing_is_said():
    assert findings(trained(lambda model: None)) == []


@given(st.floats(1e-3, 1e3))
def test_what_torch_does_is_right_for_every_limit(limit):
    (finding,) = findings(trained(lambda model: NORM(model.parameters(), limit)))
    assert not finding.outcome.is_bad
    assert f"norm {limit:g}" in finding.message


def test_clipping_that_changes_no_gradient_is_not_called_right():
    (finding,) = findings(trained(lambda model: NORM(model.parameters(), 1e3)))
    assert finding.outcome is Outcome.SKIPPED
    assert (
        finding.message == "not judged: no gradient exceeded the limit (norm 1000), so clipping had no effect (2 calls)"
    )


@pytest.mark.parametrize(("limit", "found"), [(1e-3, ["not-clipped"]), (1e3, [])])
@pytest.mark.parametrize("is_given_the_norm", [True, False])
def test_a_call_that_is_given_gradients_is_found(limit, found, is_given_the_norm):
    def clip(model: nn.Module) -> None:
        gradients = [one.grad for one in model.parameters()]
        if is_given_the_norm:
            norm = torch.stack([one.norm() for one in gradients]).norm()
            torch.nn.utils.clip_grads_with_norm_(gradients, limit, norm)
        else:
            NORM(gradients, limit)

    assert causes(trained(clip)) == found


def used_up(generator: Iterator[Any]) -> Iterator[Any]:
    assert list(generator)
    return generator


@pytest.mark.parametrize("limit", [1e-3, 1e3])
@pytest.mark.parametrize(
    "instead",
    [
        lambda model: [one.detach() for one in model.parameters()],
        lambda model: [model.get_parameter(name).data for name, _ in model.named_parameters()],
        lambda model: [nn.Parameter(one.detach().clone()) for one in model.parameters()],
        lambda model: used_up(model.parameters()),
    ],
    ids=["detached", "data", "copies", "used up"],
)
@pytest.mark.filterwarnings("ignore:.*empty generator")
def test_a_call_that_is_given_tensors_without_gradients_is_found(instead, limit):
    def clip(model: nn.Module) -> None:
        NORM(instead(model), limit)

    assert causes(trained(clip)) == (["not-clipped"] if limit < 1 else [])


def test_a_call_without_gradients_beside_one_that_clips_is_not_accused():
    def clip(model: nn.Module) -> None:
        NORM(nn.Linear(3, 2).parameters(), 1e-3)
        NORM([one.detach() for one in model.parameters()], 1e-3)
        NORM(model.parameters(), 1e-3)

    assert causes(trained(clip)) == []


def test_the_factor_of_a_script_is_told():
    training = trained(_by_hand)
    facts = training.ranks[0].steps[0].facts["clipping"]
    assert facts["calls"] == []
    assert 0 < facts["by_hand"]["factor"] < 1
    (finding,) = findings(training)
    assert f"the script itself multiplied all gradients by {facts['by_hand']['factor']:.6g}" in finding.message


def test_a_call_with_an_empty_generator_is_told():
    with pytest.warns(UserWarning, match="empty generator"):
        (note,) = findings(trained(lambda model: NORM((one for one in model.parameters() if one.dim() > 2), 1e-3)))
    assert "was given an empty generator" in note.message


def test_gradients_that_are_clipped_together_with_others_count_with_these():
    def script() -> None:
        first, second = small_model(), small_model()
        optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (first, second)]
        (loss_of(first) + loss_of(second, 1)).backward()
        NORM([*first.parameters(), *second.parameters()], 0.1)
        for optimizer in optimizers:
            optimizer.step()

    training = recorded(script)
    assert all(step.facts["clipping"]["calls"][0]["others"] > 0 for step in training.ranks[0].steps)
    assert causes(training) == []


def test_clipping_after_the_step_is_found():
    assert causes(trained(CORRECT["by name"], after=True)) == ["not-clipped"]


def test_a_norm_that_is_only_looked_at_after_the_step_is_not():
    assert causes(trained(CORRECT["only for its norm"], after=True)) == []


@pytest.mark.parametrize("sharded", [False, True])
def test_clipping_every_micro_batch_is_found(sharded):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def script(rank: int) -> None:
        model = small_model(6, 8, 4)
        if sharded:  # autograd's addition to a DTensor does not change its shard's version
            parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, 10 * step + part).backward()
                NORM(model.parameters(), 0.1)
            optimizer.step()

    training = recorded_on_ranks(script) if sharded else recorded(lambda: script(0))
    assert causes(training) == ["clipped-every-micro-batch"]
    assert not any(step.facts["clipping"]["by_hand"] for step in training.ranks[0].steps)


@pytest.mark.parametrize("change", [lambda model: NORM(model.parameters(), 0.1), lambda model: _by_hand(model)])
def test_another_models_backward_pass_leaves_what_was_done_to_gradients(change):
    """As in adversarial training: both models compute gradients before the first one steps."""

    def script(other_pass: bool) -> Callable[[], None]:
        def train() -> None:
            first, second = small_model(), small_model()
            optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (first, second)]
            for step in range(2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(first, step).backward()
                change(first)
                if other_pass:
                    loss_of(second, step).backward()
                for optimizer in optimizers:
                    optimizer.step()

        return train

    apart, alone = recorded(script(True)), recorded(script(False))
    assert causes(apart) == causes(alone) == []
    for one in ("by_hand", "edited"):
        told = [
            [step.facts["clipping"][one] for step in training.ranks[0].steps if step.optimizer == 0]
            for training in (apart, alone)
        ]
        assert told[0] == told[1]


def test_micro_batches_that_are_clipped_and_taken_away_are_not():
    """As in differentially private training: the parts are summed elsewhere."""

    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(2):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for part in range(3):
                optimizer.zero_grad()
                loss_of(model, 10 * step + part).backward()
                NORM(model.parameters(), 0.1)
                for kept, p in zip(total, model.parameters(), strict=True):
                    kept += p.grad
            for kept, p in zip(total, model.parameters(), strict=True):
                p.grad = kept
            optimizer.step()

    assert causes(recorded(script)) == []


@pytest.mark.parametrize("unscaled", [True, False])
@pytest.mark.parametrize("by_hand", [False, True])
def test_clipping_before_unscaling_is_found(unscaled, by_hand):
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if unscaled and not by_hand:
                scaler.unscale_(optimizer)
            elif unscaled:
                for p in model.parameters():
                    p.grad /= scaler.get_scale()
            NORM(model.parameters(), 0.5)
            if by_hand:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

    assert causes(recorded(script)) == ([] if unscaled else ["clipped-before-unscaling"])


def test_what_was_unscaled_stays_so_while_another_model_computes_gradients():
    def script() -> None:
        models = [small_model(), small_model()]
        optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
        scaler = torch.amp.GradScaler("cpu")
        for step in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                scaler.unscale_(optimizer)
            for model, optimizer in zip(models, optimizers, strict=True):
                NORM(model.parameters(), 0.5)
                scaler.step(optimizer)
            scaler.update()

    assert causes(recorded(script)) == []


@pytest.mark.parametrize("when", ["too early", "in time"])
def test_the_norm_of_gradients_that_changed_since_is_found(when):
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(3):
                loss_of(model, 10 * step + part).backward()
                if part == (0 if when == "too early" else 2):
                    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
            optimizer.step()

    assert causes(recorded(script)) == (["clipped-to-another-length"] if when == "too early" else [])


def test_a_limit_that_is_scaled_as_well_is_right():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        NORM(model.parameters(), 0.5 * scaler.get_scale())
        scaler.step(optimizer)

    assert causes(recorded(script)) == []


@pytest.mark.parametrize("own", [True, False])
def test_shards_that_are_clipped_by_their_own_norm_are_found(own):
    from torch.distributed.fsdp import fully_shard

    def script(rank: int) -> None:
        model = fully_shard(small_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, 10 * step + rank).backward()
            if own:
                norm = math.sqrt(sum(float(p.grad.to_local().square().sum()) for p in model.parameters()))
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, torch.tensor(norm))
            else:
                NORM(model.parameters(), 0.5)
            optimizer.step()

    assert causes(recorded_on_ranks(script)) == (["clipped-shard-by-shard"] if own else [])


def test_what_a_library_multiplies_is_no_edit_by_the_script() -> None:
    model, observer = small_model(), ClippingObserver(LossScale())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    observer.optimizer_made(optimizer)
    observer.start()
    loss_of(model).backward()
    observer.backward_ends(0)
    for by_hand in (1.0, 0.5):
        for p in parameters_of(optimizer):
            p.grad *= 0.25 * by_hand
        observer.scaled(model.parameters(), 0.25)
        assert observer.multiplied_by_hand() == pytest.approx(by_hand)
    observer.stop()
