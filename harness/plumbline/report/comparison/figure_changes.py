"""How each figure changed from A to B: estimated one by one, and decided from all estimates at once.

**Minimum effect.** Changes below δ (5 % by default) are not reported: memory layout, the size of the environment and
the link order move times by several per cent without any change of the program (Mytkowicz, Diwan, Hauswirth and
Sweeney, ASPLOS 2009). A change below δ may be real, but is seldom caused by the change that was made.

**Decision.** A figure is the ``same`` if its interval lies within ±δ: an equivalence test, not a failure to find a
difference (Schuirmann, 1987). It is ``better`` or ``worse`` if it changed by more than δ and chance does not explain
the change. Everything else is ``inconclusive``: more launches would decide.

**Runs at different times.** The samples of two runs do not include the drift of the machine between the runs, so an
interval that excludes 0 proves that the runs differ, not that the trainers do. Such a change counts only if its
interval lies wholly beyond ±δ, which leaves δ for drift (a minimum-effect test: Murphy and Myors, 1999). Interleaved
launches have the drift on both sides: there it suffices that the estimate is beyond δ and the interval excludes 0.
A machine that drifts by more than δ between two runs is still reported as a change, and drift may hide a change:
``--interleave`` avoids both.

**Many figures.** A comparison of 300 figures must not report ``worse`` when nothing changed. The procedure of
Benjamini and Hochberg (1995) over all figures limits that to 5 % of comparisons; where something did change, at most
5 % of the reported figures are wrong, on average, and a real regression, which usually shows in several figures, is
found more often than with a family-wise bound. Correlated figures, such as step time and throughput, do no harm
(Benjamini and Yekutieli, 2001, prove it for one-sided tests; ``tests/comparison/test_significance.py`` measures it
here). ``same`` needs no correction: "nothing changed" is wrong if one figure changed, and that figure is called the
same in at most 2.5 % of cases, whatever the others are (an intersection-union test: Berger, 1982). The intervals shown
are those of single figures at 95 %, so one in twenty misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean
from typing import Final

from scipy.special import ndtri  # type: ignore[import-untyped]
from scipy.stats import false_discovery_control  # type: ignore[import-untyped]

from plumbline.report.comparison.alignment import CellPair, definitions_differ
from plumbline.results.records import Measurement
from plumbline.statistics.intervals import CONFIDENCE, FEWEST_LAUNCHES, Estimate, paired_difference, welch_difference

MINIMUM_EFFECT: Final = 0.05
FALSE_ALARMS: Final = 1 - CONFIDENCE
MOST_LAUNCHES: Final = 1_000_000
"""More launches than this are never suggested: the noise is too large for any practical number."""


@dataclass(frozen=True)
class ChangeScale:
    """The scale on which two figures are subtracted: ``onto`` maps a sample onto it, ``off`` maps it back.

    ``change`` converts a difference on the scale to a change: a fraction of A (``%``), a difference of two shares
    (``points``) or of two counts (no unit). ``least`` converts the minimum effect to the scale. ``positive``: only
    positive figures can be mapped.
    """

    unit: str
    onto: Callable[[float], float]
    off: Callable[[float], float]
    change: Callable[[float], float]
    least: Callable[[float], float]
    positive: bool = False


RATIO: Final = ChangeScale("%", math.log, math.exp, math.expm1, math.log1p, positive=True)

# A share of a step: one point of it is one per cent of the step.
POINTS: Final = ChangeScale("points", float, float, float, float)

# One more event in every launch is a change, however few events there are; half an event separates it from none.
COUNTS: Final = ChangeScale("", float, float, float, lambda effect: 0.5)


def scale_of(unit: str) -> ChangeScale:
    """Return the scale for figures in ``unit``: times, rates and sizes are compared as ratios."""
    return {"share": POINTS, "count": COUNTS}.get(unit, RATIO)


class Decision(Enum):
    """Whether a figure changed, regardless of which direction is better."""

    SAME = "same"
    CHANGED = "changed"
    UNCLEAR = "unclear"
    CHANCE = "one of many"
    """It would count as changed if it were the only figure; among so many it is expected by chance."""


@dataclass(frozen=True)
class FigureDifference:
    """One difference, the minimum effect on its scale, and whether the launches of both sides alternated."""

    estimate: Estimate
    least: float
    in_turns: bool

    @property
    def chance(self) -> float:
        """The p-value: how likely so large a difference is if there is no change that counts."""
        if self.in_turns:
            return self.estimate.chance() if abs(self.estimate.mean) > self.least else 1.0
        return self.estimate.chance(self.least)

    @property
    def is_within(self) -> bool:
        low, high = self.estimate.interval
        return -self.least < low and high < self.least

    def enough(self, launches: int) -> int | None:
        """Return how many launches per side would show, with a power of 80 %, that nothing changed; None: too many."""
        errors = float(ndtri((1 + CONFIDENCE) / 2) + ndtri(0.9))  # half an interval, and its centre
        times = errors * self.estimate.error / self.least
        needed = launches * times * times  # multiplied, because a power raises OverflowError
        return math.ceil(needed) if needed < MOST_LAUNCHES else None


def decide(cases: Sequence[FigureDifference]) -> list[Decision]:
    if not cases:
        return []
    chances = [case.chance for case in cases]
    decisions = []
    for case, chance, among_all in zip(cases, chances, false_discovery_control(chances), strict=True):
        if among_all <= FALSE_ALARMS:
            decisions.append(Decision.CHANGED)
        elif case.is_within:
            decisions.append(Decision.SAME)
        else:
            decisions.append(Decision.CHANCE if chance <= FALSE_ALARMS else Decision.UNCLEAR)
    return decisions


FROM_NOTHING: Final = "it is 0 in A"
TO_NOTHING: Final = "it is 0 in B"


class FigureVerdict(str, Enum):
    """How a figure of B compares with that of A, worst first."""

    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"
    BETTER = "better"
    SAME = "same"


@dataclass(frozen=True)
class FigureChange:
    """One figure on both sides.

    ``a`` and ``b`` are in ``unit``: the mean over launches, a geometric mean where changes are ratios; without an
    estimate they are the figures that the runs recorded. ``change``, with its 95 % confidence interval from ``low`` to
    ``high``, is in ``change_unit``: a fraction of A for ``%``, else a difference. ``harm`` is the change in multiples
    of the minimum effect, positive if it is worse; None without an estimate, or if neither direction is better.
    ``reason`` explains a missing verdict, or adds to one; it can be empty. ``enough`` is the approximate number of
    launches per side that would give a verdict, if more launches would.
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
    verdict: FigureVerdict
    reason: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    change_unit: str = ""
    harm: float | None = None
    enough: int | None = None


def figure_changes(
    pairs: Iterable[CellPair], *, turns: bool, effect: float, comparable: bool
) -> tuple[FigureChange, ...]:
    """Return every figure that both cells of a pair have, worst first.

    ``turns``: the launches of both sides alternated, so samples of equal index are pairs. ``effect`` is the minimum
    effect, 0.05 for 5 %. Not ``comparable``: the machines differ, and no figure is compared.
    """
    found: list[FigureChange] = []
    estimated: list[tuple[FigureChange, FigureDifference]] = []
    for pair in pairs:
        before, after = (
            {(figure.metric, figure.rank): figure for figure in (cell.measurements if cell else ())}
            for cell in (pair.a, pair.b)
        )
        for a, b in ((figure, after[name]) for name, figure in before.items() if name in after):
            change = FigureChange(
                cell=pair.cell,
                versus=pair.versus,
                metric=a.metric,
                rank=a.rank,
                unit=a.unit,
                better=a.better,
                a=a.value,
                b=b.value,
                launches=(len(a.samples), len(b.samples)),
                verdict=FigureVerdict.INCONCLUSIVE,
                change_unit=scale_of(a.unit).unit,
            )
            if not comparable:
                found.append(replace(change, verdict=FigureVerdict.NOT_COMPARABLE, reason="the machines differ"))
            elif verdict := _without_numbers(a, b, one_run=bool(pair.versus)):
                found.append(replace(change, verdict=verdict[0], reason=verdict[1]))
            else:
                try:
                    estimated.append(_estimated(change, a, b, turns=turns, effect=effect))
                except OverflowError:
                    found.append(replace(change, reason="the launches differ so much that the estimate overflows"))
    family = decide([case for _, case in estimated])
    found += [_decided(*one, size) for one, size in zip(estimated, family, strict=True)]
    order = list(FigureVerdict)
    return tuple(sorted(found, key=lambda change: (order.index(change.verdict), -(change.harm or 0.0))))


def _without_numbers(a: Measurement, b: Measurement, *, one_run: bool) -> tuple[FigureVerdict, str] | None:
    if differences := definitions_differ(a, b, one_run=one_run):
        return FigureVerdict.NOT_COMPARABLE, "; ".join(map(str, differences))
    for side, figure in (("A", a), ("B", b)):
        if figure.refusal is not None:
            return FigureVerdict.INCONCLUSIVE, f"{side}: {figure.refusal}"
    for side, figure in (("A", a), ("B", b)):
        if len(figure.samples) < FEWEST_LAUNCHES:
            return FigureVerdict.INCONCLUSIVE, f"{side} has fewer than {FEWEST_LAUNCHES} launches"
    if scale_of(a.unit).positive and min(*a.samples, *b.samples) <= 0:
        return _with_zeros(a, b)
    return None


def _with_zeros(a: Measurement, b: Measurement) -> tuple[FigureVerdict, str]:
    if not any((*a.samples, *b.samples)):
        return FigureVerdict.SAME, "it is 0 on both sides"
    for nothing, something, reason in ((a, b, FROM_NOTHING), (b, a, TO_NOTHING)):
        if not any(nothing.samples) and min(something.samples) > 0:
            return _verdict(a.better, more=something is b), reason
    return FigureVerdict.INCONCLUSIVE, "it is 0 in some launches only, so it has no ratio"


def _estimated(
    change: FigureChange, a: Measurement, b: Measurement, *, turns: bool, effect: float
) -> tuple[FigureChange, FigureDifference]:
    scale = scale_of(a.unit)
    before, after = ([scale.onto(sample) for sample in figure.samples] for figure in (a, b))
    least = scale.least(effect)
    # Samples are pairs only if every round has a launch of both sides.
    paired = turns and len(before) == len(after)
    case = FigureDifference(
        paired_difference(before, after) if paired else welch_difference(before, after), least, paired
    )
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
    figures = (change.a, change.b, change.change, change.low, change.high, change.harm)
    if not all(math.isfinite(figure) for figure in figures if figure is not None):
        raise OverflowError  # some arithmetic on numbers this large raises it by itself
    return change, case


def _typical(samples: Sequence[float], scale: ChangeScale) -> float:
    # A byte count that is equal in all launches is shown exactly, not as exp(log(count)).
    return samples[0] if min(samples) == max(samples) else scale.off(fmean(map(scale.onto, samples)))


def _decided(change: FigureChange, case: FigureDifference, size: Decision) -> FigureChange:
    if size is Decision.SAME:
        return replace(change, verdict=FigureVerdict.SAME)
    if size is Decision.CHANGED:
        verdict = _verdict(change.better, more=case.estimate.mean > 0)
        reason = "it changed, but neither direction counts as better" if change.better is None else ""
        return replace(change, verdict=verdict, reason=reason)
    reason = "the interval includes changes above and below the minimum effect"
    if size is Decision.CHANCE:
        reason = "significant on its own, but among this many figures one such change is expected by chance"
    return replace(change, enough=case.enough(max(change.launches)), reason=reason)


def _verdict(better: str | None, *, more: bool) -> FigureVerdict:
    if better is None:
        return FigureVerdict.INCONCLUSIVE
    return FigureVerdict.BETTER if (better == "higher") == more else FigureVerdict.WORSE
