"""Why weights are wrong for reasons other than the optimizer's own steps: before, between and after the steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch

from plumbline.core.numbers import counted
from plumbline.evidence.trace import Step, Tensors, same
from plumbline.judge.causes.learning_rate import RATES_DIFFER
from plumbline.judge.causes.shared_memory import SHARED_MEMORY
from plumbline.judge.causes.stage_pattern import names_in_words
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, TraceCase, holds, register
from plumbline.judge.oracle.noise import distance, norm
from plumbline.judge.replicas import holders_of, with_tensors_of_all
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

WeightHypothesis = Hypothesis[TraceCase, Match]

DTYPES = (torch.bfloat16, torch.float16)


class UnequalStartCase(CountedCase):
    """Ranks of any training that begin with weights that they should not have."""

    @property
    @abstractmethod
    def differing(self) -> tuple[Sequence[str], int]:
        """The parameters that differ between ranks, and how many parameters there are."""


class InitialWeightsCase(TraceCase, UnequalStartCase):
    """A trace whose ranks do not begin with the job's weights."""

    @property
    def differing(self) -> tuple[Sequence[str], int]:
        every = with_tensors_of_all(self.analysis.steps[0].ranks).before
        return sorted(_differing_at_first(self.analysis)), len(every)


FirstDifference = Literal["weights before the first step", "weights before a step", "learning rates", "gradients",
                          "update"]  # fmt: skip
"""What can be the first difference between ranks."""


class PartedRanksCase(CountedCase):
    """Ranks of any training that hold different weights after some step."""

    @property
    @abstractmethod
    def first_difference(self) -> tuple[FirstDifference, Match] | None:
        """What first differs between two ranks, and where."""


class DivergedRanksCase(TraceCase, PartedRanksCase):
    """A trace whose ranks hold different weights after some step."""

    @cached_property
    def first_difference(self) -> tuple[FirstDifference, Match] | None:
        return _first_difference(self.analysis)


class ChangedWeightsCase(TraceCase):
    """A trace whose weights changed apart from the optimizer's steps."""


def _moved_by_earlier_ranks(case: TraceCase) -> Iterator[Match]:
    for rank, step in enumerate(case.analysis.steps[0].ranks):
        if times := _updates_between(case.analysis.start, step.before, step, case.analysis):
            yield Match(0, rank, {"first": rank, "times": counted(times, "update")})


def _updates_between(left: Tensors, found: Tensors, step: Step, analysis: TraceAnalysis) -> int:
    """Return how many of a step's updates lie between two sets of weights; 0 if not a whole number < world."""
    names = [name for name in left if name in found and name in step.before]
    if not names:
        return 0
    moved, made = _difference(found, left, names), _difference(step.after, step.before, names)
    if not norm(moved) or not norm(made):
        return 0
    times = round(float(moved @ made / (made @ made)))
    # Rounding of the weights limits how well the multiple is known.
    return times if 1 <= times < analysis.world and norm(moved - times * made) <= 1e-3 * norm(made) else 0


def _difference(left: Tensors, right: Tensors, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([(left[name].double() - right[name].double()).flatten() for name in names])


def _parameters_missing(case: TraceCase) -> Iterator[Match]:
    for step in case.analysis.steps[0].ranks:
        if missing := sorted(case.analysis.start.keys() - step.before.keys()):
            yield Match(0, figures={"count": len(missing), "all": len(case.analysis.start), "name": missing[0]})


def _differing_at_first(analysis: TraceAnalysis) -> set[str]:
    ranks = analysis.recorded_steps[0].ranks
    first = with_tensors_of_all(ranks).before
    return {name for step in ranks for name, value in step.before.items() if not torch.equal(value, first[name])}


def _initialised_anew(case: TraceCase) -> Iterator[Match]:
    if not _differing_at_first(case.analysis):
        yield Match(0)


def differing_parameters(names: Sequence[str], of: int) -> str:
    """Return how many parameters differ, and of which kind: ``3 of 12 parameters (all of them biases) differ``."""
    if len(names) == of:
        return "the only parameter differs" if of == 1 else f"all {of:,} parameters differ"
    biases = all(name.endswith("bias") for name in names)
    which = "" if not biases else " (a bias)" if len(names) == 1 else " (all of them biases)"
    return f"{len(names):,} of {of:,} parameters{which} {'differs' if len(names) == 1 else 'differ'}"


register(
    UnequalStartCase,
    Hypothesis[UnequalStartCase, Match]("not-broadcast", "sync",
        lambda case: [Match(0, figures={"differ": differing_parameters(*case.differing)})],
        "{differ} between the ranks",
        "broadcast all weights from one rank before the first step", 160),
)  # fmt: skip

register(
    InitialWeightsCase,
    WeightHypothesis("applied-once-a-rank", "averaging", _moved_by_earlier_ranks,
        "rank {first} starts {times} ahead of the job's weights, as if other ranks had already stepped",
        "check whether ranks share the parameters' memory", 190),
    WeightHypothesis("parameters-missing", "sync", _parameters_missing,
        "{count} of {all} parameters are missing ({name})",
        "train the model that job.model() returns", 180),
    WeightHypothesis("initialised-anew", "sync", _initialised_anew,
        "all ranks start from the same weights, but not from those of job.model()",
        "do not initialise the weights again", 170),
)  # fmt: skip


def _first_difference(analysis: TraceAnalysis) -> tuple[FirstDifference, Match] | None:
    for global_step in analysis.recorded_steps:
        for rank, step in enumerate(global_step.ranks):
            for first, names in _earlier_holders(global_step, rank):
                figures = {"holders": f"{first} and {rank}", "held": names_in_words([*names]), "first": first}
                here = Match(global_step.index, rank, figures)
                other = global_step.ranks[first]
                if not same(_of(step.before, names), _of(other.before, names)):
                    return "weights before a step" if global_step.index else "weights before the first step", here
                if same(_of(step.after, names), _of(other.after, names)):
                    continue
                if step.learning_rates != other.learning_rates:
                    return "learning rates", here
                equal = same(_of(step.gradients, names), _of(other.gradients, names))
                return "update" if equal else "gradients", here
    return None


def _earlier_holders(global_step: GlobalStep, rank: int) -> Iterator[tuple[int, Collection[str]]]:
    """Yield the earlier ranks that are the first to hold some of a rank's parameters, each with these parameters.

    If every rank holds the whole model, this is rank 0.
    """
    steps = global_step.ranks
    first = {name: ranks[0] for name, ranks in holders_of(steps).items() if name in steps[rank].before}
    for other in sorted(set(first.values()) - {rank}):
        yield other, [name for name, holder in first.items() if holder == other]


def _of(tensors: Tensors, names: Collection[str]) -> Tensors:
    return {name: tensors[name] for name in names if name in tensors}


def _differs_first_in(what: FirstDifference) -> Callable[[PartedRanksCase], Iterator[Match]]:
    def predict(case: PartedRanksCase) -> Iterator[Match]:
        if case.first_difference is not None and case.first_difference[0] == what:
            yield case.first_difference[1]

    return predict


def _rounded_on_one_rank(case: DivergedRanksCase) -> Iterator[Match]:
    for match in _differs_first_in("gradients")(case) if not case.analysis.is_staged else ():
        steps = case.analysis.recorded_steps[match.step or 0].ranks
        own, first = steps[match.rank or 0].gradients, steps[0].gradients
        ways = [(left, right, dtype) for dtype in DTYPES for left, right in ((own, first), (first, own))]
        if own.keys() == first.keys() and any(_are_roundings(*way) for way in ways):
            yield match


def _are_roundings(rounded: Tensors, whole: Tensors, dtype: torch.dtype) -> bool:
    return all(
        torch.equal(value, whole[name]) or torch.equal(value, whole[name].to(dtype).to(value.dtype))
        for name, value in rounded.items()
    )


def _tied_gradients_differ(case: DivergedRanksCase) -> Iterator[Match]:
    """Match if stages of one pipeline differ; replicas of one stage do not hold parts of a sum."""
    analysis = case.analysis
    for match in _differs_first_in("gradients")(case) if analysis.cell.parallelism.has_stages else ():
        if analysis.judged_as(match.rank or 0) == analysis.judged_as(int(str(match.figures["first"]))):
            yield match


PartedHypothesis = Hypothesis[PartedRanksCase, Match]

register(
    PartedRanksCase,
    PartedHypothesis("not-broadcast", "sync", _differs_first_in("weights before the first step"),
        "ranks begin with different weights",
        "broadcast all weights from one rank before the first step", 130),
    PartedHypothesis("changed-between-steps", "sync", _differs_first_in("weights before a step"),
        "a rank's weights changed outside of the optimizer's steps",
        "check what writes to the parameters besides the optimizer", 120),
    PartedHypothesis(RATES_DIFFER.name, RATES_DIFFER.family, _differs_first_in("learning rates"),
        RATES_DIFFER.description, RATES_DIFFER.hint, 118),
    PartedHypothesis("not-synchronised", "sync", _differs_first_in("gradients"),
        "ranks step with different gradients",
        "reduce each gradient over all ranks that hold its parameter, before the step", 116),
    PartedHypothesis("updates-differ", "optimizer", _differs_first_in("update"),
        "the same gradient updates the ranks differently",
        "check that the optimizer has the same learning rate and the same state on all ranks", 114),
)  # fmt: skip

register(
    DivergedRanksCase,
    SHARED_MEMORY,
    Hypothesis[DivergedRanksCase, Match]("tied-gradients-not-added", "sync", _tied_gradients_differ,
        "ranks {holders} both hold {held}, but step with different gradients for it",
        "sum its gradient over all ranks that hold it, on each of these ranks", 140),
    Hypothesis[DivergedRanksCase, Match]("rounded-on-some-ranks", "amp", _rounded_on_one_rank,
        "one rank steps with another rank's gradients, rounded to 16 bits",
        "cast or compress gradients in the same way on every rank", 117),
)  # fmt: skip


def _changes(case: TraceCase) -> Iterator[tuple[int, int]]:
    for before, after in pairwise(case.analysis.steps):
        for rank, step in enumerate(after.ranks):
            if not same(step.before, before.ranks[rank].after):
                yield before.index, rank


def _moved_when_skipped(case: TraceCase) -> Iterator[Match]:
    """Match if the first change between steps, or else one after the last step, follows a skipped step."""
    if (first := next(_changes(case), None)) is not None:
        if case.analysis.steps[first[0]].ranks[first[1]].skipped:
            yield Match(*first)
        return
    for trace in case.analysis.trace.ranks:
        if trace.steps and trace.final and trace.steps[-1].skipped and not same(trace.steps[-1].after, trace.final):
            yield Match()


def _weights_averaged(case: TraceCase) -> Iterator[Match]:
    if (first := next(_changes(case), None)) is not None:
        index, rank = first
        ranks = [step.after for step in case.analysis.steps[index].ranks]
        if _is_mean(case.analysis.steps[index + 1].ranks[rank].before, ranks):
            yield Match(*first)


def _is_mean(value: Tensors, ranks: Sequence[Tensors]) -> bool:
    """Return whether ``value`` is the mean of diverged ranks, a thousand times nearer to it than a rank was."""
    for name, met in value.items():
        mean = torch.stack([rank[name].double() for rank in ranks]).mean(0)
        if distance(met, mean) > 1e-3 * max(distance(rank[name], mean) for rank in ranks):
            return False
    return len(ranks) > 1


def _masters_rounded(case: TraceCase) -> Iterator[Match]:
    """Match if master weights are replaced, after a step, by their values rounded to the dtype of the model."""
    arithmetic = case.analysis.cell.arithmetic
    first = next(_changes(case), None)
    if arithmetic.masters is not None and first is not None:
        (index, rank), dtype = first, getattr(torch, arithmetic.storage)
        left, found = (case.analysis.steps[one].ranks[rank] for one in (index, index + 1))
        if all(value.equal(left.after[name].to(dtype)) for name, value in found.before.items() if name in left.after):
            yield Match(*first)


def _changed_between_steps(case: TraceCase) -> Iterator[Match]:
    if (first := next(_changes(case), None)) is not None:
        yield Match(*first)


register(
    ChangedWeightsCase,
    SHARED_MEMORY,
    WeightHypothesis("moved-when-skipped", "amp", _moved_when_skipped,
        "weights moved although the GradScaler skipped the step",
        "leave the weights unchanged when a step is skipped", 130),
    WeightHypothesis("masters-rounded", "amp", _masters_rounded,
        "the master weights are overwritten with the model's rounded weights",
        "copy the master weights to the model after each step, never the model's weights to the masters", 125),
    WeightHypothesis("weights-averaged", "sync", _weights_averaged,
        "the new weights are the mean over the ranks",
        "average gradients before the step instead", 120),
    WeightHypothesis("changed-between-steps", "optimizer", _changed_between_steps,
        "weights changed between two optimizer steps",
        "check what writes to the parameters besides the optimizer", 118),
    WeightHypothesis("changed-after-the-last-step", "optimizer", holds(lambda case: next(_changes(case), None) is None),
        "the final weights differ from those after the last step",
        "check what writes to the parameters after the training loop", 116),
)  # fmt: skip
