"""What became of an optimizer's state where training was resumed: each loss predicts the weights of later steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.core.finding import Finding
from harness.evidence.trace import RankTrace
from harness.judge.causes.cause import Cause, explained
from harness.judge.interrupted_training import Interruption
from harness.judge.oracle.oracle import Optimizers, Oracle
from harness.judge.oracle.update_replay import Intervention, replay

Errors = dict[str, float]
"""The largest error of each parameter, in × noise, over all resumed steps."""


@dataclass(frozen=True)
class _Loss:
    """A way to lose state: what it is called, where to look, and what a rank's resumed steps would then show."""

    name: str
    look: str
    predict: Callable[[int], Errors]


def explain(finding: Finding, interruption: Interruption, limit: float) -> Finding:
    """Return a finding about updates that need another state than was left with a cause.

    A loss is the cause if it explains every parameter, on every rank, that the right state does not explain.
    """
    ranks = range(len(interruption.resumed.trace.ranks))
    kept = {rank: _errors(interruption.joined(rank), interruption, interruption.place) for rank in ranks}
    wrong = {rank: [n for n, error in kept[rank].items() if not error <= limit] for rank in ranks}
    losers = [rank for rank in ranks if wrong[rank]]
    for loss in _losses(interruption):
        predicted = {rank: loss.predict(rank) for rank in losers}
        if all(predicted[rank][name] <= limit for rank in losers for name in wrong[rank]):
            first = losers[0]
            spared = [name for name, error in predicted[first].items() if not error <= limit]
            return explained(
                replace(finding, rank=first),
                _on_some_ranks(loss, losers, len(ranks)),
                _in_part(loss, wrong[first], spared, interruption),
                Cause(loss.name, "checkpoint", loss.look),
            )
    look = "is all of its state saved, and loaded into the parameters that it belongs to?"
    return explained(finding, Cause("optimizer-state-altered", "checkpoint", look))


def _losses(interruption: Interruption) -> Iterator[_Loss]:
    place = interruption.place

    def after(change: Callable[[Any], None]) -> Callable[[int], Errors]:
        return lambda rank: _errors(interruption.joined(rank), interruption, place, _once(place, change))

    def stale(steps: int) -> Callable[[int], Errors]:
        return lambda rank: _errors(_without(interruption.joined(rank), place, steps), interruption, place - steps)

    look = "momentum, or moments, begin from nothing: is optimizer.state_dict() saved, and loaded?"
    yield _Loss("optimizer-state-dropped", look, after(lambda optimizer: optimizer.state.clear()))
    yield _Loss("optimizer-count-lost", "moments are there, their count of steps begins again", after(_forget_counts))
    yield _Loss(
        "optimizer-moments-lost", "the count of steps is there, moments begin from nothing", after(_forget_moments)
    )
    for dtype in (torch.float16, torch.bfloat16):
        look = f"its tensors went through {str(dtype).removeprefix('torch.')}: save them as they are"
        yield _Loss("optimizer-state-rounded", look, after(partial(_round, dtype)))
    for steps in range(1, min(place, interruption.epoch_length) + 1):
        look = f"it is that of {steps} step{'s' if steps > 1 else ''} before: is it saved when the weights are?"
        yield _Loss("optimizer-state-stale", look, stale(steps))


def _on_some_ranks(loss: _Loss, losers: list[int], world: int) -> Cause | None:
    if len(losers) == world:
        return None
    look = f"only on rank {' and '.join(map(str, losers))} of {world}; {loss.look}"
    return Cause("optimizer-state-on-some-ranks", "checkpoint", look, rank=losers[0])


def _in_part(loss: _Loss, lost: list[str], spared: list[str], interruption: Interruption) -> Cause | None:
    if not spared:
        return None
    group = next((place for place, names in enumerate(_groups(interruption)) if set(names) == set(lost)), None)
    which = ", ".join(lost) if group is None else f"parameter group {group}"
    return Cause("optimizer-state-in-part", "checkpoint", f"only for {which}; {loss.look}")


def _groups(interruption: Interruption) -> list[list[str]]:
    oracle = interruption.whole.oracle
    names = {id(parameter): name for name, parameter in oracle.parameters.items()}
    groups = [[names[id(p)] for p in group["params"]] for group in oracle.optimizer().param_groups]
    return groups if len(groups) > 1 else []


def _errors(trace: RankTrace, interruption: Interruption, place: int, intervene: Intervention | None = None) -> Errors:
    errors: Errors = {}
    for deviation in replay(trace, interruption.resumed, intervene):
        name = deviation.parameter
        if name is not None and deviation.step is not None and deviation.step >= place:
            errors[name] = max(errors.get(name, 0.0), deviation.x_noise)
    return errors


def _without(trace: RankTrace, place: int, steps: int) -> RankTrace:
    """Leave out the last steps before the interruption."""
    return replace(trace, steps=trace.steps[: place - steps] + trace.steps[place:])


def _once(place: int, change: Callable[[Any], None]) -> Intervention:
    """Change each replay's optimizers before its first step after the interruption."""
    done: list[Optimizers] = []

    def intervene(index: int, oracle: Oracle, optimizers: Optimizers) -> None:
        if index >= place and not any(optimizers is other for other in done):
            done.append(optimizers)
            for optimizer in optimizers.every:
                change(optimizer)

    return intervene


def _forget_counts(optimizer: Any) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0


def _forget_moments(optimizer: Any) -> None:
    for tensor in _moments(optimizer):
        tensor.zero_()


def _round(dtype: torch.dtype, optimizer: Any) -> None:
    for tensor in _moments(optimizer):
        tensor.copy_(tensor.to(dtype))


def _moments(optimizer: Any) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                yield value
