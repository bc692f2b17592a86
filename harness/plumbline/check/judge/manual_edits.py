"""Decides whether wrong gradients may be intended: the script changes them between the backward pass and the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import are_one, master_steps, scale_at_clipping
from plumbline.check.judge.judged_gradients import are_by_grad, judged_gradients
from plumbline.check.judge.loss_scales import division
from plumbline.check.judge.noted import information, name_ranks, not_judged
from plumbline.check.judge.precision_used import OBSERVER as PRECISION
from plumbline.check.judge.rank_weights import (
    drift_apart,
    factor_of_equal_weights,
    rank_layout,
    ranks_begin_apart,
    weights_are_made_equal,
    when_made_equal,
)
from plumbline.check.judge.received_gradient import ReceivedGradient
from plumbline.check.judge.step_objective import NEAR, has_plain_mean, objective_of, step_objectives
from plumbline.check.judge.unreduced import (
    AVERAGED,
    MADE_EQUAL,
    MADE_EQUAL_LATER,
    ranks_hold_one_model,
    separate_adapters,
)
from plumbline.core.finding import Finding, is_unexplained
from plumbline.core.numbers import scale_text
from plumbline.core.titles import title_of
from plumbline.judge.findings import failed_with_hint, with_hint
from plumbline.judge.truth import RIGHT, Combination
from plumbline.report.text import listed

MULTIPLES = frozenset(
    {"summed-over-ranks", "averaged-twice", "divided-by-another-count", "divided-twice", "not-divided-by-micro-batches"}
)
"""Causes that amount to one factor, which is right if the loss is divided accordingly."""

SAME_LENGTH = 1e-3
"""Relative difference up to which two norms are one clipping limit, and two factors are one.

Chosen: scripts compute norms in float32, some over many entries. Gradients with the same norm at all steps are excused
as clipped by hand, so a larger number would excuse more.
"""


def excuse_manual_edits(finding: Finding, wrong: Sequence[ReceivedGradient], training: RecordedTraining) -> Finding:
    """Return the finding about wrong gradients, changed if the script's own code may intend them.

    A gradient that the script did not change after the backward pass stays wrong. A script that multiplies gradients
    itself is right if all losses together then have the weight 1. Changes that are neither known nor explained are not
    judged.
    """
    check, step = finding.check, finding.step
    if clipped_by_hand(wrong):
        if scale := _scale_at_clipping_by_hand(wrong):
            return _clipped_before_unscaling(finding, scale)
        if not weights_are_made_equal(training) and (apart := _changed_apart(check, wrong)) is not None:
            return apart
        return information(check, "the script clips gradients with its own code", step)
    if finding.cause == "not-synchronised" and weights_are_made_equal(training):
        return _with_equal_weights(check, training, step)
    if finding.cause == "not-synchronised" and ranks_begin_apart(training) and not ranks_hold_one_model(training):
        if names := separate_adapters(training):
            return not_judged(
                check,
                f"each rank begins with its own values of {listed(names)} and steps with its own gradients, next to a "
                "frozen model that FSDP shards. Unless the ranks train separate adapters, this is a mistake: add "
                "adapters before fully_shard, or broadcast them once and average their gradients",
                step,
            )
        return not_judged(
            check,
            "each rank holds its own weights and steps with its own gradients. These may be separate trainings or "
            "parts of one model. To train one model on all ranks, wrap it in DistributedDataParallel",
            step,
        )
    if any(case.step.weights_move_between_passes for case in wrong):
        return not_judged(
            check,
            "the script changes the weights between the backward passes of a step, as sharpness-aware minimisation "
            "does, so it is not known which passes should count",
            step,
        )
    hooks = training.ranks[0].noted(PRECISION).get("hooks")
    if hooks and is_unexplained(finding):
        why = f"the communication hook {listed(hooks)} changes gradients; remove it for the check"
        return not_judged(check, why, step)
    if is_unexplained(finding) and (told := _about_masters(finding, wrong, training)) is not None:
        return told
    exchanges = any(rank.noted("gathered-outputs").get("exchanges") for rank in training.ranks)
    if finding.cause == "summed-over-ranks" and exchanges:
        return not_judged(
            check,
            "gradients are the sum over ranks, not their mean, and the script exchanges outputs of all ranks without "
            "gradients. The sum is right if every rank computes the loss of all of these outputs",
            step,
        )
    if finding.cause == "summed-over-ranks" and all(map(_is_hooked_everywhere, wrong)):
        return not_judged(
            check,
            "hooks of the script change all gradients on each rank before these are added up over ranks. The sum is "
            "right if the hooks divide by the number of ranks",
            step,
        )
    if not any(map(_is_changed, wrong)):
        return finding
    factors = _factors(wrong, training)
    known = [[one for one in own if math.isfinite(one)] for own in factors]
    # One factor is right with its loss only if it is the same on all ranks.
    is_same = all(are_one(own) for own in known if own)
    is_multiple = is_same and known == factors
    is_apart = finding.cause in MULTIPLES and not is_same
    right_until_changed = _right_until_changed(wrong) if is_unexplained(finding) or is_apart else []
    if not weights_are_made_equal(training):
        if (apart := _changed_apart(check, right_until_changed)) is not None:
            return apart
        if is_apart:
            return finding
    if is_unexplained(finding) and not is_multiple:
        multiples = [*map(_multiple_of_mean_over_terms, wrong)]
        if all(abs(one - 1) <= NEAR for one in multiples):
            return information(check, "the script weights the gradient of each rank by the terms of its loss", step)
        if (apart := _right_on_some_ranks(check, wrong, training) or _reduced_apart(check, training)) is not None:
            return apart
        why = multiplied(multiples) if all(multiples) else _unknown_change(wrong, right_until_changed)
        return not_judged(check, why, step)
    if finding.cause == "some-zero":
        why = "the script sets the gradients of some parameters to zero with its own code, possibly on purpose"
        return not_judged(check, why, step)
    if finding.cause not in MULTIPLES and not (is_unexplained(finding) and is_multiple):
        return finding
    # A step with only zero gradients has no known factor, and needs none.
    found = [one for one in step_objectives(training.ranks, written=True) if math.isfinite(one.factor)]
    is_known = all(objective_of([*case.ranks.values()], written=True) for case in wrong)
    objectives = found if is_known and all(one.is_certain for one in found) else []
    if objectives and all(abs(one.total - 1) <= NEAR for one in objectives):
        return information(check, "the script multiplies gradients with its own code, as its loss requires", step)
    if is_unexplained(finding):
        return not_judged(check, multiplied([one.total for one in objectives]), step)
    if objectives and all(one.has_means and abs(one.of_losses - 1) <= NEAR for one in objectives):
        factor = (wrong[0].step.noted("clipping").get("by_hand") or {}).get("factor")
        if factor is None:  # a reduction by hand multiplies each rank's gradient by a different number
            return finding
        return with_hint(
            finding,
            f"remove the factor {factor:.6g} by which the script multiplies all gradients after the backward pass; "
            "without it, the losses have a total weight of 1",
        )
    if all(has_plain_mean([*case.ranks.values()], case.fit_of_a_multiple().factor) for case in wrong):
        return finding
    return not_judged(
        check,
        f"the script multiplies gradients with its own code ({title_of(str(finding.cause))}); it is not known "
        "whether its loss requires that",
        step,
    )


def _with_equal_weights(check: str, training: RecordedTraining, step: int | None) -> Finding:
    factor = factor_of_equal_weights(training)
    if factor is None:
        return not_judged(check, MADE_EQUAL_LATER if when_made_equal(training) == "later" else MADE_EQUAL, step)
    if factor == 1:
        return information(check, f"each rank steps with its own gradients, and {AVERAGED}", step)
    return failed_with_hint(
        check,
        "each rank steps with its own gradients, and between steps, the script adds up the weights of all ranks",
        f"divide the sum by the number of ranks, {training.world_size}",
        cause="weights-summed-over-ranks",
        family="averaging",
    )


def _right_on_some_ranks(check: str, wrong: Sequence[ReceivedGradient], training: RecordedTraining) -> Finding | None:
    """Return the failure where some ranks of one model always receive the right gradients, and the others never."""
    if weights_are_made_equal(training) or ranks_begin_apart(training):
        return None
    optimizers = {case.step.optimizer for case in wrong}
    judged = [case for case in judged_gradients(training).judged if case.step.optimizer in optimizers]
    steps = {case.index for case in judged}
    ranks = {case.rank for case in wrong}
    right = {case.rank for case in judged} - ranks
    if len(right | ranks) < training.world_size or len(wrong) < len(steps) * len(ranks) or not right:
        return None
    return failed_with_hint(
        check,
        f"the gradients are right on {name_ranks(sorted(right), training.world_size)}, but not on "
        f"{name_ranks(sorted(ranks), training.world_size)}, as if they had been reduced to some ranks only",
        "use all_reduce instead of reduce, or broadcast the result to all ranks",
        cause="reduced-to-some-ranks-only",
        family="sync",
        step=wrong[0].step.number,
        rank=min(ranks),
    )


def _multiple_of_mean_over_terms(case: ReceivedGradient) -> float:
    """Return which multiple of the mean over the terms of all ranks was received, 0 if it is not a multiple.

    A script may weight the gradient of each rank by the number of terms of its loss.
    """
    made = objective_of([*case.ranks.values()], written=True)
    if made is None or not all(share.is_even and share.weight > 0 for share in made.shares):
        return 0.0
    own = dict(zip(case.ranks, made.ranks, strict=True))

    def weight(rank: int, place: int, count: int) -> float:
        share = own[rank][place]
        return len(own) * share.terms / (made.terms * share.weight)

    fit = replace(case, free_factor=True).fit(Combination(weight))
    return fit.factor if fit.holds else 0.0


def _reduced_apart(check: str, training: RecordedTraining) -> Finding | None:
    """Return the failure where the script reduces gradients, but its ranks step with different ones and drift apart."""
    layout, apart = rank_layout(training), drift_apart(training)
    if not layout.is_data_parallel or apart is None or not any(one.differ("gradients") for one in apart[1]):
        return None
    return failed_with_hint(
        check,
        f"each rank steps with a different gradient, although {layout.reason}",
        "multiply and divide gradients only by what is equal on all ranks, such as a number of samples that is summed "
        "over the ranks; if all_reduce is called with async_op=True, wait for its result before using it",
        cause="changed-differently-on-ranks",
        family="sync",
        step=apart[0].number,
        parameter=apart[1][0].parameter.name,
    )


def _right_until_changed(wrong: Sequence[ReceivedGradient]) -> Sequence[ReceivedGradient]:
    """Return the wrong gradients of all steps but the first, if the backward passes left right ones at each of these.

    What they left is unknown for the first step that the script changes.
    """
    first = min(case.index for case in wrong)
    later = [case for case in wrong if case.index > first]
    if any(case.step.after_backward is None for case in later):
        return []
    before = map(_before_the_change, later)
    return later if all(case.fit(RIGHT).holds and bool(case.compared.any()) for case in before) else []


def _before_the_change(case: ReceivedGradient) -> ReceivedGradient:
    step = replace(case.step, unclipped=case.step.after_backward)
    return replace(case, ranks={**case.ranks, case.rank: step}, free_factor=False)


def _unknown_change(wrong: Sequence[ReceivedGradient], right_until_changed: Sequence[ReceivedGradient]) -> str:
    """Return why gradients are not judged that the script changed in an unknown way."""
    is_clipped = any(case.step.replaced is not None for case in wrong)
    if right_until_changed and not is_clipped:
        return (
            "the script changes gradients with its own code after the last backward pass; "
            "before this change, the gradients are right "
            f"(compared from step {min(case.step.number for case in right_until_changed)} on)"
        )
    how = "after it clips them" if is_clipped else "with its own code"
    return f"the script changes gradients {how}, and the result matches no known combination of the ranks' gradients"


def _changed_apart(check: str, cases: Sequence[ReceivedGradient]) -> Finding | None:
    """Return the failure where ranks changed right gradients differently, None if they changed them alike."""
    for case in cases:
        if any(_differ(case, other) for other in case.ranks.values()):
            return failed_with_hint(
                check,
                "the backward passes left the right gradients, but the script then changes them differently on each "
                "rank",
                "let the change depend only on what is equal on all ranks, such as the reduced gradients and the "
                "weights; draw random numbers for it from a generator with the same seed on each rank",
                cause="changed-differently-on-ranks",
                family="sync",
                step=case.step.number,
            )
    return None


def _differ(case: ReceivedGradient, other: RecordedStep) -> bool:
    ours, theirs = case.step.received.nan_to_num(), other.received.nan_to_num()
    if ours.shape != theirs.shape:
        return False
    apart = case.norms(ours - theirs) > SAME_LENGTH * case.norms(ours)
    return bool((apart & case.compared).any())


def _factors(wrong: Sequence[ReceivedGradient], training: RecordedTraining) -> list[list[float]]:
    """Return by which factors the ranks' gradients are right at each wrong step, NaN where one is not a multiple."""
    factors: dict[tuple[int, int], dict[int, float]] = {}
    for case in wrong:
        fit = case.fit_of_a_multiple()
        factor = fit.factor if fit.holds and fit.factor > 0 else math.nan
        factors.setdefault((case.step.optimizer, case.index), {})[case.rank] = factor
    for case in judged_gradients(training).judged:
        own = factors.get((case.step.optimizer, case.index))
        if own is not None and case.rank not in own and bool(case.compared.any()):
            own[case.rank] = 1.0  # this rank's gradient is right
    return [[*own.values()] for own in factors.values()]


def multiplied(totals: Sequence[float]) -> str:
    """Return why gradients that the script multiplies are not judged. ``totals``: the losses' resulting weights."""
    why = "the script multiplies all gradients after the backward passes"
    if not totals:
        return f"{why}, and it is not known whether its loss requires that"
    least, most = min(totals), max(totals)
    total = f"{most:.4g}" if most - least <= NEAR * most else f"{least:.4g} to {most:.4g}"
    return (
        f"{why}. With this factor, the weights of a step's losses add up to {total} instead of 1, as they do in a mean"
    )


def _about_masters(finding: Finding, wrong: Sequence[ReceivedGradient], training: RecordedTraining) -> Finding | None:
    """Return the finding about master weights' gradients that are right up to a factor; None if they are not."""
    if scale := scale_at_clipping(wrong):
        return _clipped_before_unscaling(finding, scale)
    is_one_factor = any(step.common_factor < 1 and step.factors for step in master_steps(wrong))
    return about_one_factor(finding, training, is_one_factor=is_one_factor)


def about_one_factor(finding: Finding, training: RecordedTraining, *, is_one_factor: bool) -> Finding | None:
    """Return the finding about master weights' gradients that are right up to a loss scale or another factor.

    ``is_one_factor``: all gradients of a step have one factor below 1. None if nothing is known.
    """
    if found := division(training):
        divisor = f"{found.divisor:,.6g}"
        if found.weight is not None and abs(found.weight - 1) <= NEAR:
            observed = f"they are divided by a loss scale of {divisor}, but the loss was not multiplied by it"
            hint = "multiply the loss by the loss scale before the backward pass, or set the scale to 1"
            return _named(finding, observed, hint, "loss-not-scaled", "amp")
        if found.weight is None:
            why = (
                f"at every step the master weights receive 1/{divisor} of the gradient, as with a loss scale of "
                f"{divisor}. It is not known whether the loss was multiplied by it: only loss functions of "
                "torch.nn.functional are followed"
            )
            return not_judged(finding.check, why, finding.step)
    if is_one_factor:
        why = (
            "the gradients of the master weights differ from the right ones by one factor, as after clipping; record "
            "more steps: two clipped steps are needed to tell"
        )
        return not_judged(finding.check, why, finding.step)
    return None


def _clipped_before_unscaling(finding: Finding, scale: float) -> Finding:
    observed = f"they were clipped while they were still multiplied by the loss scale of {scale_text(scale)}"
    hint = "divide gradients by the loss scale before clipping them"
    return _named(finding, observed, hint, "clipped-before-unscaling", "clipping")


def _named(finding: Finding, observed: str, hint: str, cause: str, family: str) -> Finding:
    message = f"{finding.message}; {observed}: {hint}"
    return replace(finding, message=message, hint=hint, cause=cause, family=family)


def clipped_by_hand(wrong: Sequence[ReceivedGradient]) -> bool:
    """Return whether wrong gradients of several steps have the right direction, are too short, and have one norm."""
    if len({case.index for case in wrong}) < 2 or any(case.step.unclipped is not None for case in wrong):
        return False
    results = [case.fit_of_a_multiple() for case in wrong]
    lengths = [case.step.norm for case in wrong]
    return (
        all(fit.holds and 0 < fit.factor < 1 for fit in results)
        and max(lengths) <= (1 + SAME_LENGTH) * min(lengths)
        # The same factor at every step is not clipping.
        and max(fit.factor for fit in results) > (1 + SAME_LENGTH) * min(fit.factor for fit in results)
    )


def _scale_at_clipping_by_hand(wrong: Sequence[ReceivedGradient]) -> float | None:
    """Return the loss scale that gradients contained when the script clipped them itself, None if there was none."""
    for case in wrong:
        factor = (case.step.noted("clipping").get("while_scaled") or {}).get("factor")
        scale = case.step.passes[-1].scale if case.step.passes else 1.0
        if factor is not None and factor < 1 and is_limit_unscaled(case.step.norm * scale, scale):
            return scale
    return None


def _is_changed(case: ReceivedGradient) -> bool:
    if any(one.held_in is not None for one in case.parameters):
        return False  # code that copies gradients is always the script's own
    return are_by_grad(case.step) or bool(
        case.step.noted("clipping").get("by_hand") or case.step.facts.get("gradient_hooks")
    )


def _is_hooked_everywhere(case: ReceivedGradient) -> bool:
    return int(case.step.facts.get("tensor_hooks", 0)) >= len(case.step.parameters)


def is_limit_unscaled(limit: float, scale: float) -> bool:
    """Return whether gradients with a loss scale in them were clipped to a limit that is not multiplied by it.

    A limit that is multiplied by the scale is right, and far larger than one that is not.
    """
    return scale >= 1024 and limit < math.sqrt(scale)
