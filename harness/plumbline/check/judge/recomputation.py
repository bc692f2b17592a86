"""Checks that activation checkpoints recompute what the forward computed, so that gradients match the forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plumbline.check.evidence.training import BackwardPass, Facts, Parameter, RecordedStep, RecordedTraining
from plumbline.check.judge.noted import failed_observers, not_judged, passes_of
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.findings import failed, failed_with_hint, passed
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, explain, holds, register

CHECK = "recomputation"

LIMIT = 4.0
"""How many times further from the exact gradient than its replay a gradient can be by rounding alone: twice as far if
both err, and twice that because a distance of few numbers varies."""

RUN_AGAIN = "modules that a backward pass ran again"

_OTHER_VALUES = "gave different values than the forward"
_OTHER_NUMBERS = "drew different random numbers than the forward, for example different dropout masks"


@dataclass(frozen=True, eq=False)
class RecomputationCase(CountedCase):
    """How far a backward pass is from the gradient of the forward that ran.

    ``found`` says in words what was recomputed. ``parameter`` has the largest distance in multiples of its noise, and
    ``x_noise`` is that distance. ``share`` is the distance of the whole gradient, relative to its norm. ``rerouted``
    has the selections of experts that differ from those of the forward.
    """

    found: str
    rank: int
    step: RecordedStep
    facts: Facts
    parameter: str
    x_noise: float
    share: float
    rerouted: Sequence[Facts]

    def message(self, finding: Finding, description: str, hint: str, match: Match) -> str:
        to_others = ""
        if self.rerouted:
            most = max(self.rerouted, key=lambda one: float(one["tokens"] / one["of"]))
            experts = f"experts of {most['module'] or 'the model'}"
            to_others = f", and sent {most['tokens']} of {most['of']} tokens to different {experts}"
        return f"{self.found} {description}{to_others}: {finding.message}: {hint}"


def judge_recomputation(training: RecordedTraining) -> Iterator[Finding]:
    """Yield whether recomputations match the forwards; nothing if nothing was recomputed."""
    yield from failed_observers(training, "recomputation", CHECK)
    if cut_off := max((rank.noted(CHECK).get("cut_off", 0) for rank in training.ranks), default=0):
        yield failed_with_hint(
            CHECK,
            f"{counted(cut_off, 'parameter')} in reentrant activation checkpoints never had a gradient, because no "
            "input of these checkpoints requires one",
            "pass use_reentrant=False to the checkpoint, or let its input require a gradient",
            cause="cut-off-by-a-checkpoint",
            family="unused-params",
        )
    noted = [facts for rank in training.ranks for one in passes_of(rank) if (facts := one.facts.get(CHECK))]
    if not noted:
        return
    compared, different = (sum(facts[name] for facts in noted) for name in ("compared", "different"))
    if not different and not any(facts["by_hand"] for facts in noted):
        yield passed(CHECK, f"{counted(compared, 'activation checkpoint')} recomputed the same values as the forward")
        return
    found = f"{different} of {compared} recomputed activation checkpoints" if different else RUN_AGAIN
    judged = [one for place in _suspected(training) for one in _furthest(found, *place)]
    wrong = next((one for one in judged if one.x_noise > LIMIT), None)
    if wrong is not None:
        off, number = f"gradients are off by {100 * wrong.share:.3g} %", wrong.step.number
        finding = failed(CHECK, off, step=number, rank=wrong.rank, parameter=wrong.parameter)
        yield replace(explain(finding, wrong), error_x_noise=wrong.x_noise, limit_x_noise=LIMIT)
    elif judged:
        worst = max(judged, key=lambda one: one.x_noise)
        message = f"{found} {_OTHER_VALUES}, but gradients match the forward up to rounding"
        message = message if different else f"gradients match the forward, although {found} drew random numbers"
        yield replace(passed(CHECK, message), error_x_noise=worst.x_noise, limit_x_noise=LIMIT)
    else:
        what = _OTHER_VALUES if different else "drew random numbers"
        yield not_judged(CHECK, f"{found} {what}, and their gradients could not be recomputed")


def recomputed_unjudged(training: RecordedTraining) -> set[tuple[int, str]]:
    """Return optimizer and name of each parameter for which it is unknown whether wrong values were recomputed."""
    found = set()
    for _, step, one in _suspected(training):
        size = step.norms(one.local)
        unknown = (size > 0) & size.isfinite() & ~_known(step, one)
        found |= {
            (step.optimizer, parameter.name)
            for parameter, is_one in zip(step.parameters, unknown, strict=True)
            if is_one
        }
    return found


def _suspected(training: RecordedTraining) -> Iterator[tuple[int, RecordedStep, BackwardPass]]:
    for rank in training.ranks:
        for step in rank.steps:
            for one in step.passes:
                facts = one.noted(CHECK)
                if facts.get("different") or facts.get("by_hand"):
                    yield rank.rank, step, one


def _known(step: RecordedStep, one: BackwardPass) -> Tensor:
    """Return for each parameter whether its gradient arrived, and was replayed exactly and in native precision."""
    local = step.norms(one.local)
    if one.exact is None or one.native is None:
        return torch.zeros_like(local, dtype=torch.bool)
    exact, native = step.norms(one.exact), step.norms(one.native)
    return local.isfinite() & exact.isfinite() & native.isfinite() & (local > 0)


def _furthest(found: str, rank: int, step: RecordedStep, one: BackwardPass) -> Iterator[RecomputationCase]:
    """Yield the parameter whose gradient is furthest from that of the forward, in multiples of its noise."""
    known = _known(step, one)
    if one.exact is None or one.native is None or not bool(known.any()):
        return
    exact = step.norms(one.exact)
    apart, noise = step.norms(one.local - one.exact), step.norms(one.native - one.exact)
    size, every_noise = _together(exact, known), _together(noise, known)
    # Of few numbers, some are right by chance, so relative noise is at least that of all parameters together. It cannot
    # be measured if the training is as precise as the replay; half of the digits are then enough.
    eps = max(_eps(parameter) for parameter, is_known in zip(step.parameters, known, strict=True) if is_known)
    relative = every_noise / size if every_noise and size else math.sqrt(eps)
    least = torch.maximum(noise, relative * torch.where(exact > 0, exact, size))
    ratios = torch.where(known & (apart > 0), apart / least, 0.0)
    worst = int(ratios.argmax())
    share = _together(apart, known) / size if size else float("inf")
    yield RecomputationCase(
        found,
        rank,
        step,
        one.facts[CHECK],
        step.parameters[worst].name,
        float(ratios[worst]),
        share,
        one.noted("experts").get("rerouted", ()),
    )


def _eps(parameter: Parameter) -> float:
    return torch.finfo(getattr(torch, parameter.dtype)).eps


def _together(norms: Tensor, known: Tensor) -> float:
    return float(norms[known].norm())


_OTHERS = {"python": "Python's random module", "numpy": "NumPy"}
"""Generators whose states ``torch.utils.checkpoint`` does not preserve."""


def _draws_elsewhere(case: RecomputationCase) -> Iterator[Match]:
    generators = case.facts["generators"]
    if case.facts["different"] and generators and _OTHERS.keys() >= set(generators):
        yield Match(figures={"names": " and ".join(map(_OTHERS.__getitem__, generators))})


def _draws_anew(case: RecomputationCase) -> Iterator[Match]:
    remedy = "keep preserve_rng_state=True, the default of torch.utils.checkpoint"
    if not case.facts["different"]:
        remedy = "in backward(), restore the generator states of forward(), as torch.utils.checkpoint does"
    elif case.facts["compiled"]:
        remedy = "torch.compile(backend='eager') does not preserve the generators' states; use another backend"
    if case.facts["generators"] or not case.facts["different"]:
        yield Match(figures={"remedy": remedy})


_REDRAWN = "masks-drawn-anew-in-the-backward"

register(
    RecomputationCase,
    Hypothesis(_REDRAWN, "rng", _draws_elsewhere,
        "drew different random numbers from {names} than the forward",
        "torch.utils.checkpoint preserves the states of torch's generators only; draw with torch, or outside the "
        "checkpointed function", 170),
    Hypothesis(_REDRAWN, "rng", _draws_anew, _OTHER_NUMBERS, "{remedy}", 160),
    Hypothesis("recomputed-in-another-mode", "rng", holds(lambda case: case.facts["modes"]),
        "ran in a different mode (training or evaluation) than the forward",
        "call train() and eval() before the forward or after the backward pass, not in between", 150),
    Hypothesis("experts-chosen-anew-in-the-backward", "rng", holds(lambda case: bool(case.rerouted)),
        _OTHER_VALUES,
        "choose experts outside the checkpoint, or draw noise with torch's default generator; update the bias that "
        "balances experts after the backward pass", 140),
    Hypothesis("recomputed-differently", "buffers", holds(lambda case: True),
        _OTHER_VALUES,
        "make the checkpointed function depend only on its arguments and the parameters, not on its own generator, or "
        "on a buffer or an attribute that changes after the forward", 130),
)  # fmt: skip
