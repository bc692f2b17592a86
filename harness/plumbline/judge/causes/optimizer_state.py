"""Why the optimizer of a resumed training has another state: each hypothesis predicts the remaining errors.

A replay of the resumed steps with the state that the mistake leaves must explain every parameter, on every rank, that
the right state does not explain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from plumbline.core.numbers import counted
from plumbline.evidence.trace import RankTrace
from plumbline.judge.causes.stage_pattern import ranks_in_words
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, holds, most_specific, register
from plumbline.judge.interrupted_training import Interruption
from plumbline.judge.oracle.oracle import Optimizers, Oracle
from plumbline.judge.update_replay import Intervention, replay

Errors = dict[str, float]
"""The largest error of each parameter, in × noise, over all resumed steps."""


@dataclass(frozen=True, eq=False)
class Variant:
    """A way to lose state: the errors that would then remain on a rank, and the figures for the texts."""

    errors: Callable[[int], Errors]
    figures: Mapping[str, object]


@dataclass(frozen=True, eq=False)
class OptimizerStateCase(CountedCase):
    """A resumed training whose updates need another optimizer state; ``limit`` is the largest right error, × noise."""

    interruption: Interruption
    limit: float

    @cached_property
    def wrong(self) -> dict[int, list[str]]:
        """The parameters that the right state does not explain, by rank."""
        ranks = range(len(self.interruption.resumed.trace.ranks))
        kept = {rank: self.errors(self.interruption.joined(rank), self.interruption.steps_done) for rank in ranks}
        wrong = {rank: [name for name, error in kept[rank].items() if not error <= self.limit] for rank in ranks}
        return {rank: names for rank, names in wrong.items() if names}

    def match(self, hypothesis: Hypothesis[Any, Any]) -> Match | None:
        """Return how a hypothesis fits; one about a loss must explain every wrong parameter on every rank.

        The figure ``refuted`` says whether it also predicts an error that the first rank does not have.
        """
        if hypothesis not in self._matches:
            self._matches[hypothesis] = self._match(hypothesis)
        return self._matches[hypothesis]

    @cached_property
    def _matches(self) -> dict[Hypothesis[Any, Any], Match | None]:
        """The results so far, because replays are expensive."""
        return {}

    def _match(self, hypothesis: Hypothesis[Any, Any]) -> Match | None:
        for prediction in hypothesis.predict(self):
            if isinstance(prediction, Match):
                return prediction
            predicted = {rank: prediction.errors(rank) for rank in self.wrong}
            if all(predicted[rank][name] <= self.limit for rank, names in self.wrong.items() for name in names):
                first = next(iter(self.wrong))
                refuted = any(not error <= self.limit for error in predicted[first].values())
                return Match(rank=first, figures={**prediction.figures, "refuted": refuted})
        return None

    def errors(self, trace: RankTrace, begin: int, change: Intervention | None = None) -> Errors:
        """Return the errors of a trace from a step on, with a change to the replay's optimizers."""
        errors: Errors = {}
        for deviation in replay(trace, self.interruption.resumed, change):
            name = deviation.parameter
            if name is not None and deviation.step is not None and deviation.step >= begin:
                errors[name] = max(errors.get(name, 0.0), deviation.x_noise)
        return errors

    def changed(self, rank: int, change: Callable[[Any], None]) -> Errors:
        begin = self.interruption.steps_done
        return self.errors(self.interruption.joined(rank), begin, _once(begin, change))

    def stale(self, rank: int, steps: int) -> Errors:
        """Return the errors with the state from ``steps`` steps before the interruption."""
        begin, trace = self.interruption.steps_done, self.interruption.joined(rank)
        return self.errors(replace(trace, steps=trace.steps[: begin - steps] + trace.steps[begin:]), begin - steps)

    @property
    def parameter_groups(self) -> list[list[str]]:
        """The parameters of each group of the optimizer; empty if there is one group."""
        oracle = self.interruption.whole.oracle
        names = {id(parameter): name for name, parameter in oracle.stepped.items()}
        groups = [[names[id(p)] for p in group["params"]] for group in oracle.optimizer().param_groups]
        return groups if len(groups) > 1 else []


LossHypothesis = Hypothesis[OptimizerStateCase, Variant]


def _once(begin: int, change: Callable[[Any], None]) -> Intervention:
    """Change each replay's optimizers before its first step after the interruption."""
    done: list[Optimizers] = []

    def before_step(index: int, oracle: Oracle, optimizers: Optimizers) -> None:
        if index >= begin and not any(optimizers is other for other in done):
            done.append(optimizers)
            for optimizer in optimizers.every:
                change(optimizer)

    return before_step


def _changed_by(change: Callable[[Any], None]) -> Callable[[OptimizerStateCase], Iterator[Variant]]:
    def predict(case: OptimizerStateCase) -> Iterator[Variant]:
        yield Variant(partial(case.changed, change=change), {})

    return predict


def _forget_counts(optimizer: Any) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] * 0


def _forget_moments(optimizer: Any) -> None:
    for tensor in _moments(optimizer):
        tensor.zero_()


def _moments(optimizer: Any) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                yield value


def _rounded(case: OptimizerStateCase) -> Iterator[Variant]:
    for dtype in (torch.float16, torch.bfloat16):

        def change(optimizer: Any, dtype: torch.dtype = dtype) -> None:
            for tensor in _moments(optimizer):
                tensor.copy_(tensor.to(dtype))

        yield Variant(partial(case.changed, change=change), {"dtype": str(dtype).removeprefix("torch.")})


def _stale(case: OptimizerStateCase) -> Iterator[Variant]:
    for steps in range(1, min(case.interruption.steps_done, case.interruption.epoch_length) + 1):
        yield Variant(partial(case.stale, steps=steps), {"ago": counted(steps, "step")})


LOSSES = (
    LossHypothesis("optimizer-state-dropped", "checkpoint", _changed_by(lambda optimizer: optimizer.state.clear()),
        "momentum or moments start from zero",
        "save and load optimizer.state_dict()", 170),
    LossHypothesis("optimizer-count-lost", "checkpoint", _changed_by(_forget_counts),
        "moments are restored, but the step count starts again",
        "save and load the step count", 160),
    LossHypothesis("optimizer-moments-lost", "checkpoint", _changed_by(_forget_moments),
        "the step count is restored, but moments start from zero",
        "save and load the moments", 150),
    LossHypothesis("optimizer-state-rounded", "checkpoint", _rounded,
        "the state's tensors were rounded to {dtype}",
        "save them in the dtype in which they are used", 140),
    LossHypothesis("optimizer-state-stale", "checkpoint", _stale,
        "the state is from {ago} earlier",
        "save it together with the weights", 130),
)  # fmt: skip
"""What can happen to the state, in the same way for every wrong parameter on every rank."""


def _on_some_ranks(case: OptimizerStateCase) -> Iterator[Match]:
    best = most_specific(LOSSES, case)
    world = len(case.interruption.resumed.trace.ranks)
    if best is not None and len(case.wrong) < world:
        yield _with_loss(*best, ranks=ranks_in_words([*case.wrong]), world=world)


def _in_part(case: OptimizerStateCase) -> Iterator[Match]:
    """The loss explains what is wrong on the first rank, but also predicts errors there that do not exist."""
    best = most_specific(LOSSES, case)
    if best is not None and best[1].figures["refuted"]:
        lost = next(iter(case.wrong.values()))
        groups = enumerate(case.parameter_groups)
        group = next((number for number, names in groups if set(names) == set(lost)), None)
        yield _with_loss(*best, which=", ".join(lost) if group is None else f"parameter group {group}")


def _with_loss(loss: LossHypothesis, match: Match, **figures: object) -> Match:
    description, hint = (text.format(**match.figures) for text in (loss.description, loss.hint))
    return replace(match, figures={"loss": description, "loss_hint": hint, **figures})


register(
    OptimizerStateCase,
    Hypothesis("optimizer-state-on-some-ranks", "checkpoint", _on_some_ranks,
        "only on {ranks} (of {world}), {loss}",
        "{loss_hint}", 190),
    Hypothesis("optimizer-state-in-part", "checkpoint", _in_part,
        "only for {which}, {loss}",
        "{loss_hint}", 180),
    *LOSSES,
    Hypothesis("optimizer-state-altered", "checkpoint", holds(lambda case: True),
        "the state was not lost, rounded or taken from an earlier step",
        "save all of it, and load it for the same parameters", 120),
)  # fmt: skip
