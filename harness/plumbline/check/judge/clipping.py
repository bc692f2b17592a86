"""Checks that gradients were clipped once, when complete, averaged and unscaled, and by the norm of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_parts import (
    NORM_KNOWN_TO,
    OBSERVER,
    TO_AVOID_ZERO,
    are_equal,
    clipped_apart,
    clipped_by_another_norm,
    clipped_copies_apart,
    clipped_copies_in_parts,
    clipped_shard_by_shard,
    complete,
    differ,
    is_effective,
    last_calls,
    last_pass,
    multiplied_copies,
    multiplied_shards,
    numbers,
    rounding,
)
from plumbline.check.judge.manual_edits import is_limit_unscaled
from plumbline.check.judge.noted import (
    FIRST_SEEN,
    ObserverFacts,
    failed_observers,
    headline_note,
    information,
    name_ranks,
    not_judged,
    noted,
)
from plumbline.check.judge.rank_weights import rank_layout, weights_are_made_equal
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted, scale_text
from plumbline.judge.findings import passed
from plumbline.report.text import listed


def judge_clipping(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is wrong with clipping calls, or what they did; nothing if the script does not clip."""
    flaws = [
        _of_others,
        _before_unscaling,
        _after_the_step,
        _every_micro_batch,
        _before_averaging,
        _to_other_limits,
        clipped_shard_by_shard,
        clipped_copies_in_parts,
    ]
    found = [finding for flaw in flaws if (finding := flaw(training)) is not None]
    # Each of these can follow from the earlier ones.
    for flaw in (multiplied_shards, clipped_copies_apart, multiplied_copies, clipped_by_another_norm, _other_length):
        if not found and (finding := flaw(training)) is not None:
            found = [finding]
    yield from found
    yield from failed_observers(training, OBSERVER, "clipping")
    clipped = [one for one in noted(training, OBSERVER) if complete(one)]
    if clipped and not found:
        yield from _done(training, clipped)
    yield from _in_part(clipped)
    if not found:
        yield from _of_an_empty_generator(training)
        yield from _by_hand(training)


def _of_others(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        for call in () if one.facts["calls"] else one.facts["missed"]:
            # A shard's norm is at most that of the whole gradient.
            norm = math.hypot(call["norm"], call["others"]) / call["scale"]
            if call["kind"] == "norm" and call["norm_type"] == 2.0 and norm > call["limit"]:
                return one.failed(
                    "clipping",
                    f"a call that should clip gradients of norm {norm:.6g} to {call['limit']:g} was given "
                    f"{call['instead']}, so it changed nothing",
                    "give torch's clipping functions the parameters that the optimizer steps",
                    cause="not-clipped",
                    family="clipping",
                )
    return None


def _before_unscaling(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        for call in one.facts["calls"]:
            if is_limit_unscaled(call["limit"], call["scale"]) and not call["late"] and is_effective(call, one.facts):
                return one.failed(
                    "clipping",
                    f"gradients were clipped to {call['limit']:g} while they were still multiplied by the loss scale "
                    f"of {scale_text(call['scale'])}",
                    "call scaler.unscale_(optimizer) before clipping",
                    cause="clipped-before-unscaling",
                    family="clipping",
                )
    return None


def _after_the_step(training: RecordedTraining) -> Finding | None:
    histories: dict[tuple[int, int], list[ObserverFacts]] = {}
    for one in noted(training, OBSERVER):
        histories.setdefault((one.rank, one.step.optimizer), []).append(one)
    for steps in histories.values():
        calls = [(one, call) for one in steps for call in one.facts["calls"]]
        late = [(one, call) for one, call in calls if call["late"] and is_effective(call, one.facts)]
        if late and all(call["late"] for _, call in calls):
            one, call = late[0]
            return one.failed(
                "clipping",
                f"gradients are clipped to {call['limit']:g} only after the optimizer's step has used them",
                "clip between the last backward pass and the step",
                cause="not-clipped",
                family="clipping",
            )
    return None


def _every_micro_batch(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        last = last_pass(one)
        for call in one.facts["calls"]:
            early = last is not None and call["pass"] < last and not call["inside"]
            if early and call["kept"] and not call["late"] and is_effective(call, one.facts):
                return one.failed(
                    "clipping",
                    f"gradients were clipped to {call['limit']:g} before the last backward pass of their step",
                    "clip once, after the last backward pass",
                    cause="clipped-every-micro-batch",
                    family="clipping",
                )
    return None


def _before_averaging(training: RecordedTraining) -> Finding | None:
    for ranks, calls in last_calls(training, sharded=False, kinds=("norm", "value")):
        if not any(is_effective(call, ranks[rank].facts) for rank, call in calls.items()):
            continue
        relative, first_call = rounding(ranks), next(iter(calls.values()))
        held = [math.hypot(call["norm"], call["others"]) for call in calls.values()]
        used = [call["returned"] for call in calls.values()]
        norms: Sequence[float] = []
        steps = [one.step for one in ranks.values()]
        if are_equal([step.received for step in steps], relative):
            if differ(held, relative) and _were_averaged(steps, relative):
                norms = held
        elif all(call["kind"] == "norm" for call in calls.values()) and all(step.replaced is None for step in steps):
            were_equal = are_equal([step.before_clipping for step in steps], relative)
            if were_equal and differ(used, max(NORM_KNOWN_TO, relative)):
                norms = used  # computed earlier, from other gradients
        if norms:
            how = f"by its own norm ({numbers(norms)})"
            if first_call["kind"] == "value":
                how = f"the entries of its own gradient to ±{first_call['limit']:g}"
            return clipped_apart(
                ranks.number,
                f"each rank clipped {how}, although all ranks step with the same gradient",
                "clip after the all-reduce",
                "clipped-before-averaging",
            )
    return None


def _were_averaged(steps: Sequence[RecordedStep], within: float) -> bool:
    """Return whether ranks step with a multiple of the mean of their clipped gradients.

    For pieces of a model this is unknown, and counts as true.
    """
    clipped = [step.replaced for step in steps if step.replaced is not None]
    if len(clipped) < len(steps):
        return all(step.is_in_pieces for step in steps)
    mean, received = torch.stack(clipped).nan_to_num().mean(0), steps[0].received.nan_to_num()
    if not bool(mean.any()):
        return False
    factor = float(mean @ received / (mean @ mean))
    return float((received - factor * mean).norm()) <= within * float(received.norm())


def _to_other_limits(training: RecordedTraining) -> Finding | None:
    """Find ranks that clip the same gradient, averaged by a wrapper, to different limits, so that they diverge.

    A rank that does not clip has no limit.
    """
    if not rank_layout(training).is_data_parallel or weights_are_made_equal(training):
        return None  # each rank may train its own model, or one rank's weights may replace the others'
    for ranks, calls in last_calls(training, sharded=False, kinds=("norm", "value"), on_all_ranks=False):
        limits = [calls[rank]["limit"] if rank in calls else math.inf for rank in ranks]
        factors = [calls[rank]["factor"] if rank in calls else 1.0 for rank in ranks]
        if len(set(limits)) > 1 and differ(factors, max(NORM_KNOWN_TO, rounding(ranks))):
            if not are_equal([one.step.before_clipping for one in ranks.values()], rounding(ranks)):
                continue
            what = f"ranks clip the same gradient to different limits ({listed(f'{one:g}' for one in limits)})"
            if len(calls) < len(ranks):
                what = f"the same gradient is clipped on {name_ranks(sorted(calls), len(ranks))} only"
            hint = "clip to the same limit on all ranks"
            return clipped_apart(ranks.number, what, hint, "clipped-to-another-length")
    return None


def _other_length(training: RecordedTraining) -> Finding | None:
    for one in noted(training, OBSERVER):
        for call in one.facts["calls"]:
            norm = math.hypot(call["norm"], call["others"])
            if call["kind"] != "norm" or call["norm_type"] != 2.0 or call["sharded"] or call["given"]:
                continue
            if not norm or norm == math.inf:
                continue
            due = min(1.0, call["limit"] / (norm + TO_AVOID_ZERO))
            if abs(call["factor"] - due) > max(NORM_KNOWN_TO, one.facts["roundings"]) * due:
                return one.failed(
                    "clipping",
                    f"clipping to {call['limit']:g} multiplied gradients of norm {norm:.6g} by {call['factor']:.6g} "
                    f"instead of {due:.6g}",
                    "call torch.nn.utils.clip_grad_norm_, or give clip_grads_with_norm_ the norm of all gradients",
                    cause="clipped-to-another-length",
                    family="clipping",
                )
    return None


def _done(training: RecordedTraining, clipped: list[ObserverFacts]) -> Iterator[Finding]:
    """Yield what the calls did. If none of them changed a gradient, it is unknown whether they are right.

    A call without a limit only measures the norm.
    """
    every = [(call, one.facts) for one in clipped for call in complete(one)]
    calls = [(call, facts) for call, facts in every if call["limit"] < math.inf]
    if not calls:
        return
    limits = listed(dict.fromkeys(f"{call['kind']} {call['limit']:g}" for call, _ in calls))
    shorter = sum(is_effective(call, facts) for call, facts in calls)
    made = counted(len(calls), "call") + (" of all ranks" if training.world_size > 1 else "")
    if shorter:
        yield passed(
            "clipping",
            f"gradients were clipped to {limits} between the last backward pass and the step; {shorter} of {made} "
            "scaled them down",
        )
    else:
        yield not_judged("clipping", f"no gradient exceeded the limit ({limits}), so clipping had no effect ({made})")


def _in_part(clipped: list[ObserverFacts]) -> Iterator[Finding]:
    for one in clipped:
        calls = complete(one)
        covered = max(call["covered"] for call in calls)
        if covered < one.facts["of"]:
            yield information(
                "clipping",
                f"a call clipped only {covered} of the {one.facts['of']} gradients of an optimizer{FIRST_SEEN} at "
                f"{one.name}",
            )
            return


def _of_an_empty_generator(training: RecordedTraining) -> Iterator[Finding]:
    for one in noted(training, OBSERVER):
        if one.facts.get("empty"):
            yield headline_note(
                "clipping",
                f"A clipping call before {one.name} was given an empty generator, so it clipped nothing. A generator "
                "such as model.parameters() can be used only once: call model.parameters() again, or make a list.",
            )
            return


def _by_hand(training: RecordedTraining) -> Iterator[Finding]:
    for one in noted(training, OBSERVER):
        factor = (one.facts["by_hand"] or {}).get("factor")
        is_copied = any(each.held_in is not None for each in one.step.parameters)
        if factor is not None and not is_copied:
            yield information(
                "clipping",
                f"the script itself multiplied all gradients by {factor:.6g} between the last backward pass and the "
                f"step{FIRST_SEEN} at {one.name} on rank {one.rank}",
            )
            return
