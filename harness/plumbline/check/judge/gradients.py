"""Judges a script's gradients against the mean over ranks of what its backward passes computed."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts, RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import up_to_clipping
from plumbline.check.judge.exchanges import with_losses, with_shared_loss, with_stages
from plumbline.check.judge.joint_truth import BY_ELIMINATION, JointTruth
from plumbline.check.judge.judged_gradients import (
    IN_PARTS,
    REASONS,
    REDUCED_IN_STEP,
    are_by_grad,
    judged_gradients,
)
from plumbline.check.judge.manual_edits import excuse_manual_edits
from plumbline.check.judge.noted import headline_note, information, name_ranks, not_judged, steps_within_passes
from plumbline.check.judge.precision_used import OBSERVER as PRECISION
from plumbline.check.judge.rank_weights import LAYOUT, shared_numbers, weights_at
from plumbline.check.judge.received_gradient import ReceivedGradient
from plumbline.check.judge.rows_used import all_use_different_rows, all_use_the_same_rows
from plumbline.check.judge.step_objective import is_loss_divided
from plumbline.check.judge.unreduced import are_outside, judge_replicated_gradients, with_reason
from plumbline.core.finding import UNEXPLAINED, Finding, is_unexplained
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import Information, failed_with_hint, with_hint
from plumbline.judge.hypothesis import Hypothesis, holds, register
from plumbline.judge.oracle.noise import PROJECTION_MARGIN, Deviation
from plumbline.judge.truth import RIGHT, Combination, GradientEvidence, Truth
from plumbline.replay.reasons import STALE
from plumbline.report.text import listed

CHECK = "gradients"

_WITHOUT_WRAPPER: Mapping[str, str] = {
    "not-synchronised": (
        "wrap the model in DistributedDataParallel, or average the gradients over ranks between the backward pass and "
        "the step. If the script averages weights every few steps instead, as in local SGD, record more --steps than "
        "that"
    ),
    "averaged-twice": "remove one of the two divisions",
    "some-micro-batches-not-synchronised": "reduce the gradients of all micro-batches",
}
"""Hints by cause for a script without DistributedDataParallel, where hints about that wrapper would mislead."""

_SHARDED: Mapping[str, str] = {
    "not-synchronised": (
        "run the last backward pass of each step outside no_sync(), or with set_requires_gradient_sync(True)"
    ),
}
"""The same where FSDP shards the model."""

_WITH_MASTERS: Mapping[str, str] = {
    "not-synchronised": (
        "average the gradients of the model over ranks before they are copied to those that the optimizer holds; under "
        "DeepSpeed, run the last backward pass of each step outside no_sync()"
    ),
}
"""The same where the optimizer holds copies of the model's parameters."""

_IN_HOOKS = (
    "the optimizer steps inside the backward pass, before any averaging over ranks; average each gradient in the hook "
    "that steps, or step after the backward pass"
)

_BY_GRAD = (
    "average the results of torch.autograd.grad over ranks before the step: DistributedDataParallel averages only what "
    "backward() computes"
)

_ONE_FORWARD = (
    "several backward passes follow the last call of the DistributedDataParallel object, which averages only in the "
    "first one; add up the losses, and call backward() once"
)

_OVER_TOO_FEW = ("not-synchronised", "averaged-over-some-ranks")


def _is_held_back(case: ReceivedGradient) -> bool:
    """Return whether gradients that FSDP2 holds back are missing, and the others are right."""
    are_zero = torch.tensor(case.zeros)
    are_right = case.errors(RIGHT)[0] <= PROJECTION_MARGIN
    return case.is_held_back and bool(are_zero.any()) and bool((are_zero | are_right).all())


def _comes_a_step_late(case: ReceivedGradient) -> bool:
    """Return whether FSDP2 held the previous step's gradients back, and added them to those of this step."""
    before, every = case.previous, RIGHT.weight
    return before is not None and _is_held_back(before) and case.fit(Combination(every, earlier=every)).holds


def _is_mean_of_several_parameters(case: ReceivedGradient) -> bool:
    """Return whether ranks averaged the gradients that each of them has, one after the other, but of other parameters.

    Parameters of one size can be mixed up like this without an error.
    """
    arrived = {rank: case.norms(_local(step)).nonzero().flatten().tolist() for rank, step in case.ranks.items()}
    own = arrived[case.rank]
    sizes = {tuple(case.parameters[number].entries for number in numbers) for numbers in arrived.values()}
    if len(sizes) > 1 or all(numbers == own for numbers in arrived.values()):
        return False
    ranks = {rank: _renumbered(step, dict(zip(arrived[rank], own, strict=True))) for rank, step in case.ranks.items()}
    return replace(case, ranks=ranks).fit(RIGHT).holds


def _local(step: RecordedStep) -> Tensor:
    return sum((one.local.abs() for one in step.passes), torch.zeros_like(step.received))


def _renumbered(step: RecordedStep, numbers: Mapping[int, int]) -> RecordedStep:
    """Return the step with the gradients of some parameters as those of others, and without any other gradients."""
    passes = []
    for one in step.passes:
        parts = step.parts(one.local)
        made = [torch.zeros_like(part) for part in parts]
        for number, other in numbers.items():
            made[other] = parts[number]
        passes.append(replace(one, local=torch.cat(made), exact=None))
    return replace(step, passes=tuple(passes))


register(
    ReceivedGradient,
    Hypothesis("reduced-with-another-parameter", "sync", holds(_is_mean_of_several_parameters),
        "the mean of gradients of different parameters: each rank reduced only the gradients that it has",
        "reduce the gradients of all parameters on every rank, with zeros where a rank has none", 320),
    Hypothesis("rounded-to-16-bits", "amp", holds(lambda case: case.is_right_to_16_bits),
        "accurate to 16 bits only, although the master weights and the model's weights have wider dtypes",
        "check for 16-bit buffers in which gradients are accumulated, averaged or copied", 65),
    Hypothesis("reduction-switched-off", "sync",
        holds(lambda case: _is_held_back(case) or _comes_a_step_late(case)),
        "missing, because FSDP's gradient reduction is switched off",
        "call set_requires_gradient_sync(True) and set_requires_all_reduce(True) before the last backward pass of each "
        "step, also of a shorter one at the end of an epoch", 936),
)  # fmt: skip


def judge_gradients(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a verdict on all gradients, with the cause if one is wrong, and why others were not judged.

    If the forward that all ranks compute together (the joint forward) could be differentiated, its derivative decides
    what is right. Ranks that hold parts of a model need not receive the mean of what their backward passes compute.
    """
    if (stale := _stale(training)) is not None:
        yield stale
        return
    found = list(_compared(training))
    if not any(one.outcome is Outcome.FAILED for one in found):
        # A mean over ranks is right even if the script averaged nothing.
        instead = judge_replicated_gradients(training) or _edited_after_clipping(training)
        if instead is not None:
            others = [one for one in found if one.outcome is not Outcome.PASSED or isinstance(one, Information)]
            found = [instead, *others]
    yield from found


def _on_shared_losses(joint: JointTruth) -> Iterator[Finding]:
    """Yield a note if each loss is computed by several ranks together, but gradients are a mean over all ranks."""
    size, world = joint.ranks_of_a_loss, joint.losses
    if joint.divides_again:
        yield headline_note(
            CHECK,
            f"Each loss is computed by {size} ranks together, but gradients are divided by all {world} ranks: they are "
            f"1/{size} of those of the mean loss. Divide them by {world // size}, unless this is intended.",
        )


def _on_stages(joint: JointTruth) -> Iterator[Finding]:
    if joint.is_pipeline and joint.not_compared:
        ranks = name_ranks(joint.not_compared, joint.training.world_size)
        yield headline_note(
            CHECK,
            f"{ranks[0].upper()}{ranks[1:]} received activations, but it is not known which backward pass of another "
            "rank begins with the gradients that are sent back for them, so these were not compared. All gradients are "
            "judged as if these were right.",
        )


def _edited_after_clipping(training: RecordedTraining) -> Finding | None:
    """Return a finding if the script changed gradients after clipping. They are compared as they were before it."""
    steps = (step for step in training.steps if step.unclipped is not None)
    edited = [one.number for one in steps if one.noted("clipping").get("edited")]
    why = "the script changes gradients after it clips them, possibly on purpose; before clipping they were right"
    return not_judged(CHECK, why, min(edited)) if edited else None


def _compared(training: RecordedTraining) -> Iterator[Finding]:
    truth, joint = ReplayTruth(training), JointTruth(training)
    if joint.compared:
        finding = with_stages(training, joint.judge())
        if joint.is_of_same_losses or joint.ranks_of_a_loss > 1:
            finding = with_shared_loss(training, finding, is_sum=joint.is_sum and joint.is_of_same_losses)
        later = _about_later_steps(joint, truth, finding)
        by_replay = _replays_decide(joint, truth, finding)
        if by_replay is None and later is not None and later.outcome is Outcome.FAILED:
            by_replay = later
        yield _of_unequal_copies(joint, _of_different_batches(training, by_replay or finding))
        if later is not None and later.outcome is Outcome.SKIPPED and not by_replay:
            yield later
        elif joint.obstacle and finding.outcome is Outcome.PASSED and not by_replay:
            yield not_judged(CHECK, f"step {joint.first_unjudged}: {joint.obstacle}", joint.first_unjudged)
        if finding.outcome is Outcome.PASSED and not by_replay:
            yield from _on_equal_values(joint)
            yield from _on_shared_losses(joint)
            yield from _on_stages(joint)
        return
    if truth.cases and REDUCED_IN_STEP in truth.gradients.unjudged:
        yield not_judged(CHECK, _of_optimizers(truth.gradients.unjudged[REDUCED_IN_STEP]) + REDUCED_IN_STEP)
    finding = truth.judge()
    if finding.outcome is Outcome.SKIPPED and joint.obstacle:
        finding = replace(finding, message=f"no gradients were judged: {joint.obstacle}")
    if finding.cause == "some-parameters-not-synchronised" and joint.obstacle:
        wrong = dict.fromkeys(name for name, _ in _wrong_parameters(truth))
        if are_outside(wrong, training):
            why = (
                f"ranks may hold different parts of {listed(wrong)}, which DistributedDataParallel does not wrap, and "
                f"their forward could not be recomputed together: {joint.obstacle}"
            )
            finding = not_judged(CHECK, why, finding.step)
    yield from with_losses(training, finding)
    if finding.outcome is Outcome.PASSED:
        yield from _of_hooks(training)
    if finding.outcome is Outcome.PASSED and truth.gradients.with_fewer_passes:
        yield information(
            CHECK,
            "the script changes the weights between the backward passes of a step, as sharpness-aware minimisation "
            "does. Gradients at earlier weights are discarded and do not count",
        )
    is_by_grad = any(map(are_by_grad, training.steps))
    if finding.outcome is Outcome.PASSED and truth.gradients.with_discarded_passes:
        yield information(
            CHECK,
            "the script discards the gradients of some backward passes before the last ones of a step, as for "
            "adversarial examples or estimates of curvature. If they should count, "
            + ("add up the results of torch.autograd.grad" if is_by_grad else "call zero_grad() only once a step"),
        )
    if finding.outcome is Outcome.PASSED and truth.gradients.at_several_weights:
        yield headline_note(
            CHECK,
            "The script changes the weights between the backward passes of a step, and the gradients of all passes "
            "count. Sharpness-aware minimisation discards those at earlier weights: if this is meant, call zero_grad() "
            "after the change.",
        )
    if finding.outcome is Outcome.PASSED and (names := truth.gradients.with_gradients_of_other_steps):
        yield headline_note(
            CHECK,
            f"The gradients of {listed(names)} include those of backward passes before another optimizer's step. If "
            "this is not intended, call zero_grad() after these passes.",
        )


def _on_equal_values(joint: JointTruth) -> Iterator[Finding]:
    """Yield what right gradients mean for parameters with equal values, which may be copies or separate ones."""
    if joint.alike:
        yield headline_note(
            CHECK,
            f"{_which(joint.alike, 'has', 'have')} equal values and equal gradients on several "
            "ranks. The gradients are right for shards. Shards that start equal stay equal and do the same work: "
            "initialize each with a different seed. Gradients of replicas are divided too often.",
        )
    if doubtful := joint.doubtful - joint.alike:
        yield headline_note(
            CHECK,
            f"{_which(doubtful, 'starts', 'start')} with equal values on several ranks, but "
            "the gradients differ between these ranks. That is right for shards. For replicas, sum the gradients "
            "over these ranks: each rank has only the part of its own tokens or inputs.",
        )
    if joint.layers:
        yield headline_note(
            CHECK,
            f"{_which(joint.layers, 'starts', 'start')} with equal values in different pipeline "
            "stages. That is right for separate layers, although a different seed on each rank is better. For "
            "layers that share weights, add up the gradients of all stages before each step.",
        )
    if joint.perhaps_tied:
        (name, rank), (other, other_rank) = joint.perhaps_tied[0]
        yield headline_note(
            CHECK,
            f"{name} on rank {rank} and {other} on rank {other_rank} start with equal values in different pipeline "
            "stages, but get different gradients. That is right for separate parameters. For one tied weight, add "
            "up the gradients of both before each step.",
        )


def _which(members: Collection[tuple[str, int]], verb: str, verb_of_several: str) -> str:
    names = sorted({name for name, _ in members})
    return f"{listed(names)} {verb if len(names) == 1 else verb_of_several}"


def _of_hooks(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note if the script's hooks run on each rank before gradients are reduced.

    The mean of clamped gradients is not the clamped mean. The same holds for the gradients of micro-batches.
    """
    hooked = max((step.facts.get("tensor_hooks", 0) for step in training.steps), default=0)
    if hooked and training.world_size > 1:
        yield information(
            CHECK,
            f"the script has hooks on {counted(hooked, 'parameter')}. They run on each rank before gradients are "
            "averaged; gradients are judged as the hooks return them",
        )


def _replays_decide(joint: JointTruth, truth: ReplayTruth, finding: Finding) -> Finding | None:
    """Return the finding of the replays if it names a mistake that the joint forward leaves open, otherwise None.

    The joint forward leaves a failure open if it names the cause by elimination only. If it finds nothing wrong, it
    leaves open whether parameters that may be replicas are averaged as replicas. The replays then count only if the
    joint forward judged a sum over ranks, or judged none of the parameters that the replays call wrong, and these
    cannot be parts. Whether a sum is right depends on the losses. If the joint forward found some parameters wrong, the
    replays never count against parameters that it found right.
    """
    has_failed = finding.outcome is Outcome.FAILED
    if not (finding.cause in BY_ELIMINATION if has_failed else joint.may_be_replicas):
        return None
    known = truth.judge()
    if known.outcome is not Outcome.FAILED or is_unexplained(known):
        return None
    if known.cause == "not-synchronised" and joint.is_of_one_loss and _is_tensor_parallel(joint.training):
        return None  # there is nothing to average over ranks that compute one loss from parts of the same layers
    wrong = list(_wrong_parameters(truth))
    if has_failed:
        counts = not joint.has_found_right(wrong)
    elif joint.is_sum and known.cause == "summed-over-ranks":
        if is_loss_divided(joint.training.ranks) is None:
            return not_judged(
                CHECK,
                f"gradients are the sum over {joint.losses} ranks, not their mean. That is right if each loss is "
                "divided for all ranks together, which could not be determined",
                known.step,
            )
        counts = False
    elif joint.is_sum:
        counts = True
    else:
        counts = not joint.has_judged(wrong) and not joint.may_be_parts(wrong)
    return known if counts else None


def _about_later_steps(joint: JointTruth, truth: ReplayTruth, finding: Finding) -> Finding | None:
    """Return the finding about steps that the joint forward did not judge, None if nothing can be said about them.

    If gradients are the mean over ranks of what the backward passes computed at the steps that it judged, they should
    be so at all steps.
    """
    if finding.outcome is not Outcome.PASSED:
        return None
    compared = {number for number, _ in joint.compared}
    right = [case.fit(RIGHT).holds for case in truth.cases if case.step.number in compared]
    if not right or not all(right) or len(right) == len(truth.cases):
        return None
    return truth.judge()


_UNREDUCED = ("not-synchronised", "some-parameters-not-synchronised", "exchanged-otherwise", UNEXPLAINED)


def _of_different_batches(training: RecordedTraining, finding: Finding) -> Finding:
    """Return the finding, or a failure that blames the batches if tensor-parallel ranks each use different rows."""
    if finding.cause not in _UNREDUCED or not _is_tensor_parallel(training) or not all_use_different_rows(training):
        return finding
    failed = failed_with_hint(
        CHECK,
        f"all {training.world_size} ranks hold parts of the same layers (tensor parallelism), but each uses different "
        "samples, so their gradients belong to no common batch",
        "give all ranks of a tensor-parallel group the same batches: seed and divide them by the data-parallel rank",
        cause="replica-of-different-samples",
        family="data",
        step=finding.step,
    )
    return replace(failed, error_x_noise=finding.error_x_noise, limit_x_noise=finding.limit_x_noise)


def _of_unequal_copies(joint: JointTruth, finding: Finding) -> Finding:
    """Return the finding; its hint tells of parameters that may have to begin equal, if nothing else explains it.

    In tensor parallelism, all ranks compute the same loss, unless what is not divided differs between them.
    """
    training = joint.training
    may_differ = joint.is_of_same_losses or joint.is_pipeline or not all_use_the_same_rows(training)
    if finding.cause != "exchanged-otherwise" or may_differ:
        return finding
    first = next(training.common_steps, None)
    names = [] if first is None else [one.parameter.name for one in weights_at(first) if one.differ("before")]
    if not names:
        return finding
    return with_hint(
        finding,
        f"{finding.hint}. All ranks use the same rows, but compute different losses: unless each computes a part of "
        f"one loss, make those of {listed(names)} that are not divided over ranks begin with equal values, and make "
        "dropout draw equal masks",
    )


def _is_tensor_parallel(training: RecordedTraining) -> bool:
    """Return whether DTensors shard the layers of every module over all ranks, and FSDP shards none."""
    modules = [module for rank in training.ranks for module in rank.noted(LAYOUT).get("modules", ())]
    layouts = [set(module["layouts"]) for module in modules if module["layouts"]]
    in_parts = ["1: Shard" in one and one <= {"1: Replicate", "1: Shard"} for one in layouts]
    return bool(in_parts) and all(in_parts) and not any(module["sharded_as_data"] for module in modules)


def _wrong_parameters(truth: ReplayTruth) -> Iterator[tuple[str, int]]:
    for case in truth.cases:
        if not case.fit(RIGHT).holds:
            errors = case.errors(RIGHT)[0]
            for number, parameter in enumerate(case.parameters):
                if bool(case.compared[number]) and float(errors[number]) > PROJECTION_MARGIN:
                    yield parameter.name, case.rank


class ReplayTruth(Truth[ReceivedGradient]):
    """Compares what each optimizer received with the mean over ranks of what the step's backward passes computed."""

    def __init__(self, training: RecordedTraining) -> None:
        self.training = training
        self.gradients = judged_gradients(training)

    @property
    def cases(self) -> Sequence[ReceivedGradient]:
        return self.gradients.judged

    def compare(self) -> Finding:
        if not self.cases:
            why = _why_none(self.training, self.gradients.unjudged)
            return Finding(CHECK, Outcome.SKIPPED, f"no gradients were judged: {why}")
        fits = [(case, case.fit(RIGHT)) for case in self.cases]
        wrong = [case for case, fit in fits if not fit.holds]
        if wrong:
            return _finding(wrong)
        noise = [case.in_noise(RIGHT, fit.factor) for case, fit in fits]
        known = [one for one in noise if one is not None]
        worst = max(known, key=lambda one: (one.x_noise, one.limit or 0.0), default=None)
        right = f"every gradient that was judged is {_mean(self.cases[0])}{_removed(self.cases)}"
        if self.cases[0].divisor not in (None, self.cases[0].world):
            right += "; set_gradient_divide_factor() requests this, so the loss must be divided for all ranks together"
        return _with_noise(Finding(CHECK, Outcome.PASSED, right), worst)

    def place(self, finding: Finding, wrong: Sequence[ReceivedGradient]) -> Finding:
        return not_judged(CHECK, IN_PARTS, wrong[0].step.number) if any(case.parts for case in wrong) else finding

    def evidence(self, wrong: Sequence[ReceivedGradient]) -> GradientEvidence[ReceivedGradient]:
        """Return only the wrong gradients: for a script, it is unknown at which steps a mistake has an effect."""
        factor = statistics.median(map(_factor, wrong))
        # It is unknown what the step before the first recorded one left in the gradients.
        known = [case for case in wrong if case.has_earlier_step or not case.step.number]
        return GradientEvidence([replace(case, factor=factor) for case in up_to_clipping(known or wrong)])

    def conclude(self, finding: Finding, wrong: Sequence[ReceivedGradient]) -> Finding:
        if is_unexplained(finding) and (ranks := _ranks_that_skip(wrong)):
            who = name_ranks(ranks, self.training.world_size)
            finding = failed_with_hint(
                CHECK,
                f"{finding.message}: {who} skipped a step that other ranks took, and from then on, ranks average the "
                "gradients of different steps",
                "let all ranks skip a step together: all-reduce what they decide by, such as whether a loss is finite",
                cause="skipped-on-some-ranks",
                family="sync",
                **{name: getattr(finding, name) for name in ("step", "rank", "parameter")},
            )
        names = {name for name, _ in _wrong_parameters(self)} if finding.family == "sync" else ()
        advised = with_reason(_advised(finding, self.training), names, self.training)
        return excuse_manual_edits(advised, wrong, self.training)


def _ranks_that_skip(wrong: Sequence[ReceivedGradient]) -> list[int]:
    """Return the ranks that discarded the gradients of which other ranks received the mean at the first wrong step."""
    first = [case for case in wrong if case.index == min(each.index for each in wrong)]
    fewest = min(case.micro_batches for case in first)
    ranks = {rank: replace(step, passes=step.passes[:fewest]) for rank, step in first[0].ranks.items()}
    took = [case for case in first if case.micro_batches == fewest]
    if not fewest or not all(replace(case, ranks=ranks).fit(RIGHT).holds for case in took):
        return []
    return [rank for rank, step in first[0].ranks.items() if len(step.passes) > fewest]


def _stale(training: RecordedTraining) -> Finding | None:
    for rank in training.ranks:
        uncovered = rank.noted("uncovered")
        names = [name for name, why in uncovered.items() if STALE in why]
        if names:
            return failed_with_hint(
                CHECK,
                f"{STALE}: it kept its unsharded parameters after a forward without a backward pass, and did not "
                "gather them again",
                "move every forward without a backward pass, such as an evaluation, to after optimizer.step()",
                cause="stale-weights",
                family="sync",
                rank=rank.rank,
                parameter=names[0],
            )
    return None


def _advised(finding: Finding, training: RecordedTraining) -> Finding:
    layouts = [rank.noted(LAYOUT) for rank in training.ranks]
    if finding.cause in _OVER_TOO_FEW and (why := _why_unreduced(training, layouts)):
        return with_hint(finding, why)
    if finding.cause == "not-synchronised" and steps_within_passes(training):
        return with_hint(finding, _IN_HOOKS)
    if finding.cause == "not-synchronised" and any(map(are_by_grad, training.steps)):
        return with_hint(finding, _BY_GRAD)
    if any(one.get("wrapped") for one in layouts):
        is_again = finding.cause == "some-micro-batches-not-synchronised" and _have_one_forward(training)
        return with_hint(finding, _ONE_FORWARD) if is_again else finding
    is_sharded = any(module["sharded_as_data"] for one in layouts for module in one.get("modules", ()))
    has_masters = any(step.is_in_pieces and not step.is_divided for step in training.steps)
    advice = {**_WITHOUT_WRAPPER, **(_SHARDED if is_sharded else {}), **(_WITH_MASTERS if has_masters else {})}
    other = advice.get(str(finding.cause))
    return finding if other is None else with_hint(finding, other)


def _have_one_forward(training: RecordedTraining) -> bool:
    steps = list(training.steps)
    forwards = [one.noted("batches").get("forwards") for step in steps for one in step.passes[1:]]
    return bool(forwards) and not any(forwards)


def _why_unreduced(training: RecordedTraining, layouts: Sequence[Facts]) -> str:
    """Return what keeps DistributedDataParallel from averaging over all ranks, "" if that is not known."""
    wrappers = [module["wrapper"] for one in layouts for module in one.get("modules", ()) if module["wrapper"]]
    fewest = min((one.get("ranks", training.world_size) for one in wrappers), default=training.world_size)
    if fewest < training.world_size:
        return (
            f"DistributedDataParallel averages over {counted(fewest, 'rank')} of {training.world_size}; pass the "
            "process group of all ranks that train the model"
        )
    if hooks := training.ranks[0].noted(PRECISION).get("hooks"):
        return (
            f"check that the communication hook {listed(hooks)} averages gradients over the ranks, and that the "
            "DistributedDataParallel object is called outside no_sync()"
        )
    return ""


def _finding(wrong: Sequence[ReceivedGradient]) -> Finding:
    case, fit = wrong[0], wrong[0].fit(RIGHT)
    expected, received = case.value(RIGHT), case.received
    size, length = float(expected.norm()), float(received.norm())
    cosine = float(expected @ received) / (size * length) if size and length else 0.0
    # One parameter may be wrong among many larger ones.
    deviations = case.in_noise(RIGHT, 1.0), case.in_noise(RIGHT, 1.0, fit.worst)
    noise = next((one for one in deviations if one is not None and not one.is_right), None)
    several = f" (the first of {len(wrong)} over all ranks and steps)" if len(wrong) > 1 else ""
    where = f"{case.location}{several}"
    finding = Finding(
        CHECK,
        Outcome.FAILED,
        f"gradients at {where} are not {_mean(case)}: norm {length / size if size else float('inf'):.4g} × the right "
        f"one, cosine {cosine:.4f}",
        step=case.step.number,
        parameter=case.parameters[fit.worst].name,
        rank=case.rank,
    )
    return _with_noise(finding, noise)


def _with_noise(finding: Finding, noise: Deviation | None) -> Finding:
    return finding if noise is None else replace(finding, error_x_noise=noise.x_noise, limit_x_noise=noise.limit)


def _factor(case: ReceivedGradient) -> float:
    value = case.value(RIGHT)
    square = float(value @ value)
    return float(case.received @ value) / square if square else 0.0


def _mean(case: ReceivedGradient) -> str:
    if case.divisor not in (None, case.world):
        divided = "" if case.divisor == 1 else f", divided by {case.divisor:.4g},"
        return f"the sum over {case.world} ranks{divided} of what the backward passes computed"
    over = [f"the mean over {case.world} ranks of" if case.world > 1 else "", "what the backward passes computed"]
    return " ".join(filter(None, over))


def _removed(judged: Iterable[ReceivedGradient]) -> str:
    names = {one.name for case in judged for one, gone in zip(case.parameters, case.removed, strict=True) if gone}
    if not names:
        return ""
    return f"; the script sets those of {listed(sorted(names))} to None, so the step does not update these parameters"


def _why_none(training: RecordedTraining, unjudged: Mapping[str, Sequence[ReceivedGradient]]) -> str:
    if not any(rank.steps for rank in training.ranks):
        return "no optimizer stepped"
    if len(training.ranks) < training.world_size:
        return f"only {len(training.ranks)} of {training.world_size} ranks recorded steps"
    if not unjudged:
        return _why_no_case(training)
    return next(why for why in REASONS if why in unjudged)


def _why_no_case(training: RecordedTraining) -> str:
    steps = training.at(0)
    if len({(step.optimizer, step.number) for step in steps.values()}) > 1:
        return "ranks did not step the same optimizers in the same order"
    if not any(shared_numbers(steps).values()):
        return (
            "no parameter is in every rank's optimizer: the ranks hold different parts of a model, and their forwards "
            "could not be recomputed together"
        )
    return "every step was skipped"


def _of_optimizers(cases: Iterable[ReceivedGradient]) -> str:
    names = dict.fromkeys(case.step.noted("update").get("class") or "an optimizer" for case in cases)
    return f"{listed(names)}: "
