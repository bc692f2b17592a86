"""Notes on what is likely a mistake although the training does what its script says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.check.judge.noted import ObserverFacts, amount, failed_observers, headline_note, information, noted
from plumbline.check.judge.rank_weights import JOINT
from plumbline.core.finding import Finding
from plumbline.report.text import listed


def judge_lost_ties(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note for each lost tie. The first rank's ties are those of all ranks."""
    yield from failed_observers(training, "ties", "update")
    facts = training.ranks[0].noted("ties")
    lost = [tuple(pair) for pair in facts.get("lost", ())]
    for first, second in dict.fromkeys(lost):
        yield headline_note(
            "update",
            f"{first} and {second} were one parameter when the model was built, but are two now, and each is "
            "trained separately. Tie them again before you create the optimizer: to_empty() and "
            "load_state_dict(assign=True) untie parameters.",
        )
    for first, second in dict.fromkeys(map(tuple, facts.get("declared", ()))):
        if {first, second} not in map(set, lost):
            yield headline_note(
                "update",
                f"The model's configuration has tie_word_embeddings, but {first} and {second} are two parameters, and "
                "each is trained separately. Call model.tie_weights() before you create the optimizer.",
            )


def judge_unused_losses(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note on the losses that no recorded backward pass of any rank uses."""
    yield from failed_observers(training, "unused-losses", "objective")
    facts = [rank.noted("unused-losses") for rank in training.ranks]
    used = {name for one in facts for name in one.get("used", ())}
    unused = sorted({name for one in facts for name in one.get("unused", ())} - used)
    if unused:
        several = len(unused) > 1
        yield headline_note(
            "objective",
            f"The model computes {listed(unused)} with gradients, but no recorded backward pass uses "
            f"{'them' if several else 'it'}. Add {'them' if several else 'it'} to the loss, or detach "
            f"{'them' if several else 'it'} if only the value is needed.",
        )


def judge_gathered_outputs(training: RecordedTraining) -> Iterator[Finding]:
    """Yield notes on forwards and losses that use other ranks' outputs as constants."""
    yield from failed_observers(training, "gathered-outputs", "objective")
    if JointTruth(training).cut_off:
        return  # that no gradient reaches some parameters is reported as wrong
    is_received = any(step.noted(JOINT).get("leaves_out") for step in training.ranks[0].steps)
    used = sorted({name for rank in training.ranks for name in rank.noted("gathered-outputs").get("used", ())})
    if is_received or used:
        gathers = "a collective, such as torch.distributed.all_gather,"
        if not is_received:
            gathers = listed([f"torch.distributed.{name}" for name in used])
        yield headline_note(
            "objective",
            f"The {'forward' if is_received else 'loss'} uses outputs of other ranks that {gathers} returned. These "
            "have no gradient, so each rank's gradients leave out how the losses of other ranks depend on its own "
            "outputs. For the gradient of the loss over the whole batch, gather with a function that has a gradient, "
            "such as torch.distributed.nn.functional.all_gather. If this is intended, gather under torch.no_grad().",
        )
    if any(rank.noted("gathered-outputs").get("reduced") for rank in training.ranks):
        yield information(
            "objective",
            "the loss uses a tensor that torch.distributed.all_reduce changed in place. Autograd does not record this, "
            "so each rank computes only its own part of the gradient of the loss of all ranks. The mean of these parts "
            f"over ranks is 1/{training.world_size} of their sum, which is that gradient. Unless the loss makes up for "
            "this, use torch.distributed.nn.functional.all_reduce, which has a gradient",
        )


_DTYPES = ("bfloat16", "float16")


def judge_rounded_updates(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note where most updates of 16-bit weights, or the weight decay of all, round to nothing at every step."""
    yield from failed_observers(training, "moved-weights", "precision")
    steps: dict[tuple[int, int], list[ObserverFacts]] = {}
    for one in noted(training, "moved-weights"):
        steps.setdefault((one.rank, one.step.optimizer), []).append(one)
    for own in steps.values():
        if all(map(_are_lost, own)) and not _warms_up(own):
            most = max(own, key=lambda one: one.facts["moved"])
            moved, due = most.facts["moved"], most.facts["due"]
            yield headline_note(
                "precision",
                f"In each step, at most {amount(moved)} of the {amount(due)} {_formats(own)} weights that have a "
                "gradient change at all; the other updates are lost to rounding. Keep the weights in float32 and "
                "compute in autocast, or use an optimizer that keeps a copy of them in float32.",
            )
            return
    for own in steps.values():
        decays = max(one.facts.get("decays", 0) for one in own)
        if decays and not any(one.facts.get("decayed") for one in own) and not _warms_up(own):
            yield headline_note(
                "precision",
                f"Weight decay changes none of {amount(decays)} {_formats(own)} weights: the product of learning rate "
                "and weight_decay is smaller than the spacing of these numbers. Keep the weights in float32 and "
                "compute in autocast, or use Adam or AdamW with fused=True, which rounds the decay and the update "
                "together.",
            )
            return


def _formats(steps: Sequence[ObserverFacts]) -> str:
    return listed(sorted({one.dtype for one in steps[0].step.parameters} & set(_DTYPES)))


def _are_lost(one: ObserverFacts) -> bool:
    """Return whether a step changes fewer than half of the entries, and makes less than half of the right update.

    Only torch's own optimizers are judged: others may keep what is rounded away, or the weights, in float32.
    """
    update = one.step.noted("update")
    if not update.get("of_torch") or not one.facts["due"] or 2 * one.facts["moved"] >= one.facts["due"]:
        return False
    rows = [row for row in update["parameters"] if _is_small(one, int(row[0]))]
    due, made = sum(row[3] ** 2 for row in rows), sum(row[5] for row in rows)
    return bool(0 < due > 2 * made)


def _warms_up(steps: list[ObserverFacts]) -> bool:
    """Return whether the learning rate grows, so that the larger updates are still to come."""
    rates = [one.step.noted("learning-rate").get("rates", []) for one in steps]
    return any(later > before for one, other in pairwise(rates) for before, later in zip(one, other, strict=False))


def _is_small(one: ObserverFacts, number: int) -> bool:
    own = [each for each in one.step.parameters if each.held_in == number] or one.step.parameters[number : number + 1]
    return any(each.dtype in _DTYPES for each in own)
