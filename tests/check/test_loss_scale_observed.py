"""The GradScaler's steps: skipped on overflow, on all ranks, and without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observed_steps import loss_of, recorded, recorded_on_ranks, small_model
from torch import Tensor

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.loss_scales import judge_skipped_steps
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome


def findings(training: RecordedTraining) -> list[Finding]:
    return list(judge_skipped_steps(training))


def causes(training: RecordedTraining) -> list[str | None]:
    return [finding.cause for finding in findings(training) if finding.outcome.is_bad]


def amp(
    *,
    infinite: Callable[[int, int], bool] = lambda step, rank: step == 1,
    with_scaler: bool = True,
    fused: bool = False,
    unscale: bool = False,
    scaler_class: type = torch.amp.GradScaler,
) -> Callable[[int], None]:
    def script(rank: int = 0) -> None:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        scaler = scaler_class("cpu")
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (math.inf if infinite(step, rank) else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if with_scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    return script


class FoundByOthers(torch.amp.GradScaler):
    """A GradScaler that overrides a method, like the sharded one."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, FoundByOthers])
def test_a_skipped_step_is_seen_and_right(fused, unscale, scaler_class):
    training = recorded(amp(fused=fused, unscale=unscale, scaler_class=scaler_class))
    steps = training.ranks[0].steps
    assert [step.skipped for step in steps] == [False, True, False]
    assert [one.scale for step in steps for one in step.passes] == [2.0**16, 2.0**16, 2.0**15]
    (finding,) = findings(training)
    assert finding.outcome is Outcome.PASSED
    assert "skipped 1 of 3 steps" in finding.message


def test_without_a_scaler_nothing_is_said():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of(model).backward()
        optimizer.step()

    assert findings(recorded(script)) == []


def test_a_disabled_scaler_has_no_scale():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)

    (step,) = recorded(script).ranks[0].steps
    assert step.passes[0].scale == 1.0
    assert not step.facts["loss-scale"]["scaled"]


def test_a_pass_that_no_scaler_scaled_has_the_scale_one():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        loss_of(model).backward()
        scaler.step(optimizer)

    (step,) = recorded(script).ranks[0].steps
    assert [one.scale for one in step.passes] == [2.0**16, 1.0]


def test_steps_with_infinities_are_found():
    assert causes(recorded(amp(with_scaler=False))) == ["not-finite"]


class MovesWhenSkipped(torch.amp.GradScaler):
    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if sum(float(found) for found in state["found_inf_per_device"].values()):
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(0.9)
            return None
        return super()._maybe_opt_step(optimizer, state, *args, **kwargs)


class SkipsEverything(torch.amp.GradScaler):
    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return None


def test_a_skipped_step_that_moves_weights_is_found():
    assert causes(recorded(amp(scaler_class=MovesWhenSkipped))) == ["moved-when-skipped"]


def test_steps_that_are_skipped_for_nothing_are_found():
    assert causes(recorded(amp(scaler_class=SkipsEverything, infinite=lambda *_: False))) == ["skipped-for-nothing"]


def test_a_step_that_only_some_ranks_skip_is_found():
    training = recorded_on_ranks(amp(infinite=lambda step, rank: step == 1 and rank == 1))
    assert causes(training) == ["overflow-decided-alone"]
    (finding,) = (one for one in findings(training) if one.outcome.is_bad)
    assert (finding.step, finding.rank) == (1, 1)


def test_ranks_that_skip_together_are_right():
    assert causes(recorded_on_ranks(amp())) == []


def test_losses_are_the_same_bit_for_bit():
    from observed_steps import watching

    def losses() -> list[Tensor]:
        model = small_model()
        optimizer = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        values = []
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, step)
            values.append(loss.detach())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return values

    plain = losses()
    with watching():
        assert losses() == plain
