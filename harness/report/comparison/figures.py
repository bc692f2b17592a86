"""What changed in a run's figures: each of them estimated, all of them weighed together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from harness.report.comparison.align import Pair
from harness.report.comparison.changes import Verdict
from harness.report.comparison.comparable import definitions_differ
from harness.report.comparison.scale import Scale, scale_of
from harness.report.comparison.verdict import Case, Size, sizes
from harness.results.records import Measurement
from harness.statistics.intervals import FEWEST_LAUNCHES
from harness.statistics.two_samples import paired_difference, welch_difference

FROM_NOTHING: Final = "there was none of it before"
TO_NOTHING: Final = "there is none of it any more"


@dataclass(frozen=True)
class FigureChange:
    """One figure, before and after.

    ``a`` and ``b`` are the figures in ``unit``: what a launch measures on average, a geometric one where changes are
    ratios, so that the change is that from one to the other; without an estimate, what the runs say. ``change`` (and
    with 95 % confidence from ``low`` to ``high``) is in ``change_unit``: a part of A for ``%``, else a difference.
    ``harm`` is the change in multiples of the least effect, positive for the worse; None where there is no estimate,
    or neither way is better. ``reason`` says why there is no verdict, or what else must be known; empty where the
    numbers speak. ``enough`` is about how many launches a side would tell, where too few are what is wrong.
    """

    cell: str
    versus: str
    metric: str
    rank: int | None
    unit: str
    better: str | None
    a: float | None
    b: float | None
    launches: tuple[int, int]
    verdict: Verdict
    reason: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    change_unit: str = ""
    harm: float | None = None
    enough: int | None = None


@dataclass(frozen=True)
class _Estimated:
    change: FigureChange
    case: Case


def weigh(pairs: Iterable[Pair], *, turns: bool, effect: float, comparable: bool) -> tuple[FigureChange, ...]:
    """Return every figure that both cells of a pair have, the worst first.

    ``turns``: samples of equal place were launched one after the other. ``effect`` is the least effect, 0.05 for 5 %.
    Not ``comparable``: the machines differ, and no figure is weighed.
    """
    settled: list[FigureChange] = []
    estimated: list[_Estimated] = []
    for pair in pairs:
        for a, b in figures_of_both(pair):
            change = _plain(pair, a, b)
            if not comparable:
                settled.append(replace(change, verdict=Verdict.NOT_COMPARABLE, reason="the machines differ"))
            elif verdict := _without_numbers(a, b, one_run=bool(pair.versus)):
                settled.append(replace(change, verdict=verdict[0], reason=verdict[1]))
            elif one := _estimated(change, a, b, turns=turns, effect=effect):
                estimated.append(one)
            else:
                settled.append(replace(change, reason="the launches spread too widely to be computed with"))
    family = sizes([one.case for one in estimated])
    settled += [_weighed(one, size) for one, size in zip(estimated, family, strict=True)]
    return tuple(sorted(settled, key=_worst_first))


def figures_of_both(pair: Pair) -> list[tuple[Measurement, Measurement]]:
    """Return the figures that both sides have, by metric and rank."""
    after = _by_name(pair.b.measurements if pair.b else ())
    before = _by_name(pair.a.measurements if pair.a else ())
    return [(figure, after[name]) for name, figure in before.items() if name in after]


def _by_name(figures: Sequence[Measurement]) -> dict[tuple[str, int | None], Measurement]:
    return {(figure.metric, figure.rank): figure for figure in figures}


def _plain(pair: Pair, a: Measurement, b: Measurement) -> FigureChange:
    return FigureChange(
        cell=pair.cell,
        versus=pair.versus,
        metric=a.metric,
        rank=a.rank,
        unit=a.unit,
        better=a.better,
        a=a.value,
        b=b.value,
        launches=(len(a.samples), len(b.samples)),
        verdict=Verdict.INCONCLUSIVE,
        change_unit=scale_of(a.unit).unit,
    )


def _without_numbers(a: Measurement, b: Measurement, *, one_run: bool) -> tuple[Verdict, str] | None:
    """Return the verdict on two figures that cannot be estimated, and why; None if they can."""
    if differences := definitions_differ(a, b, one_run=one_run):
        return Verdict.NOT_COMPARABLE, "; ".join(map(str, differences))
    for side, figure in (("A", a), ("B", b)):
        if figure.refusal is not None:
            return Verdict.INCONCLUSIVE, f"{side}: {figure.refusal}"
    for side, figure in (("A", a), ("B", b)):
        if len(figure.samples) < FEWEST_LAUNCHES:
            return Verdict.INCONCLUSIVE, f"{side} has fewer than {FEWEST_LAUNCHES} launches"
    if scale_of(a.unit).positive and min(*a.samples, *b.samples) <= 0:
        return _around_nothing(a, b)
    return None


def _around_nothing(a: Measurement, b: Measurement) -> tuple[Verdict, str]:
    """Return what can be said where there is no ratio, because something is 0."""
    if not any((*a.samples, *b.samples)):
        return Verdict.SAME, "there is none of it"
    for nothing, something, reason in ((a, b, FROM_NOTHING), (b, a, TO_NOTHING)):
        if not any(nothing.samples) and min(something.samples) > 0:
            return _toward(a.better, more=something is b), reason
    return Verdict.INCONCLUSIVE, "it is 0 in some launches only, and has no ratio"


def _estimated(
    change: FigureChange, a: Measurement, b: Measurement, *, turns: bool, effect: float
) -> _Estimated | None:
    """Return the change with its estimate; None where no floating-point number holds one of its bounds."""
    try:
        return _with_numbers(change, a, b, turns=turns, effect=effect)
    except OverflowError:
        return None


def _with_numbers(change: FigureChange, a: Measurement, b: Measurement, *, turns: bool, effect: float) -> _Estimated:
    scale = scale_of(a.unit)
    before, after = ([scale.onto(sample) for sample in figure.samples] for figure in (a, b))
    least = scale.least(effect)
    # Rounds that are not whole on both sides are no rounds.
    paired = turns and len(before) == len(after)
    case = Case(paired_difference(before, after) if paired else welch_difference(before, after), least, paired)
    difference, (low, high) = case.estimate.mean, case.estimate.interval
    sign = {"higher": -1.0, "lower": 1.0, None: None}[a.better]
    change = replace(
        change,
        a=_typical(a.samples, scale),
        b=_typical(b.samples, scale),
        change=scale.change(difference),
        low=scale.change(low),
        high=scale.change(high),
        harm=None if sign is None else sign * difference / least,
    )
    return _Estimated(change, case)


def _typical(samples: Sequence[float], scale: Scale) -> float:
    # A byte count that every launch agrees on is shown as it is, not as what logarithms leave of it.
    return samples[0] if min(samples) == max(samples) else scale.off(fmean(map(scale.onto, samples)))


def _weighed(one: _Estimated, size: Size) -> FigureChange:
    if size is Size.SAME:
        return replace(one.change, verdict=Verdict.SAME)
    if size is Size.CHANGED:
        verdict = _toward(one.change.better, more=one.case.estimate.mean > 0)
        reason = "it changed, and neither way is better" if one.change.better is None else ""
        return replace(one.change, verdict=verdict, reason=reason)
    return replace(
        one.change,
        enough=one.case.enough(max(one.change.launches)),
        reason=(
            "it would count if it were the only figure; among so many, one such is to be expected"
            if size is Size.CHANCE
            else "the interval holds both a change that counts and one that does not"
        ),
    )


def _toward(better: str | None, *, more: bool) -> Verdict:
    if better is None:
        return Verdict.INCONCLUSIVE
    return Verdict.BETTER if (better == "higher") == more else Verdict.WORSE


def _worst_first(change: FigureChange) -> tuple[int, float]:
    return list(Verdict).index(change.verdict), -(change.harm or 0.0)
