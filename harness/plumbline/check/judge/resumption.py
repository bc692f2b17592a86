"""Checks that a training that was interrupted and resumed continues like one that was not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.noted import headline_note, not_judged
from plumbline.check.judge.rank_weights import of_all
from plumbline.check.judge.resumed_training import (
    STATE,
    Resumption,
    judge_resumed_state,
    same_weights,
    shares_states,
    step_at,
    weights_of,
)
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted, scale_text
from plumbline.judge.causes.stage_pattern import ranks_in_words
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.report.text import in_two_digits

CHECK = "resumption"

ROUNDING = 1e-4
"""Relative distance of weights that a different order of sums explains. Chosen: rounding of float32 grows to less in a
few steps, and rounding to bfloat16 causes a thousandth. Below it, no failure is reported."""

SAME_SETTING = 1e-6
"""Relative distance up to which settings are equal: schedules in closed form round differently than step-by-step
ones."""

_LOADED_NOTHING = "check that a checkpoint had been saved, that the command finds it, and that its weights are loaded"


def judge_resumption(
    first: Sequence[RecordedTraining],
    resumed: Sequence[RecordedTraining],
    whole: Sequence[RecordedTraining],
    interrupted: int,
) -> Iterator[Finding]:
    """Yield how the resumed training differs, the first cause first, or that it continues like the whole one.

    Args:
        first: the training that was interrupted.
        resumed: the same training, as recorded after the restart.
        whole: the same training without an interruption, at least up to the step of the interruption.
        interrupted: the number of steps that the first training took.
    """
    why = _why_not(first, resumed, whole, interrupted)
    if why:
        yield not_judged(CHECK, why)
        return
    found = {
        optimizer: _begins(whole[0], resumed[0], interrupted, optimizer)
        for optimizer in sorted({step.optimizer for rank in resumed[0].ranks for step in rank.steps})
    }
    for optimizer, begins in found.items():
        if not begins:
            yield _weights(Resumption(whole[0], resumed[0], interrupted, {optimizer: interrupted}), optimizer)
            return
    last = {optimizer: begins[-1] for optimizer, begins in found.items()}
    # If weights do not change, as in skipped steps, several steps begin with the same ones.
    pairs = [
        Resumption(whole[0], resumed[0], interrupted, {**last, min(found): begin})
        for begin in reversed(found[min(found)])
    ]
    sizes = _other_sizes(pairs[0])
    wrongs = [judge_resumed_state(pair) or (None if sizes else _in_each_step(pair)) for pair in pairs]
    if None not in wrongs:
        yield next(one for one in wrongs if one is not None)
        return
    pair = pairs[wrongs.index(None)]
    steps = {place for place, *_ in pair.pairs()}
    if not steps:
        yield not_judged(CHECK, f"the uninterrupted training ended before step {pair.begin}")
        return
    yield passed(CHECK, _agree(pair, len(steps), sizes))
    if sizes and not _uses_the_same_samples(pair):
        yield not_judged(CHECK, f"{sizes}: samples, learning rates and loss scales cannot be compared step by step")
    compared, every, has_shards = _extent(pair)
    if has_shards:
        why = "the others are shards, and another number of ranks splits them differently"
        yield not_judged(CHECK, f"{of_all(compared, every)} could be compared: {why}")
    if _draws_otherwise(pair):
        yield headline_note(
            CHECK,
            "The random number generators are not restored: after the restart, the forward pass draws different "
            "numbers. To make both trainings equal, save and restore torch.get_rng_state() and the device's, such as "
            "torch.cuda.get_rng_state(), on each rank.",
        )


def _in_each_step(pair: Resumption) -> Finding | None:
    return _settings(pair) or _samples(pair) or _loss_scale(pair)


def _agree(pair: Resumption, steps: int, sizes: str) -> str:
    """Return in words what agrees; ``sizes`` says why steps cannot be compared one by one."""
    rows = "samples, " if _rows(pair.whole.ranks[0].steps[-1]) else ""
    each = f"{rows}learning rates and loss scales agree in {counted(steps, 'step')}"
    if sizes:
        each = f"{sizes}; both trainings use the same samples" if _uses_the_same_samples(pair) else sizes
    states = "weights and states" if pair.same_ranks or shares_states(pair) else "weights"
    older = "" if pair.begin == pair.interrupted else f", the last one that was saved before step {pair.interrupted},"
    compared, every, _ = _extent(pair)
    part = "" if compared == every else f" (compared for {of_all(compared, every)})"
    return (
        f"at step {pair.begin}{older} the optimizers of the resumed training have the {states} of the uninterrupted "
        f"one{part}; {each}"
    )


def _extent(pair: Resumption) -> tuple[int, int, bool]:
    """Return the numbers of compared and of all parameters of the first rank, and whether others are shards."""
    compared, every, has_shards = 0, 0, False
    for optimizer, begin in pair.begins.items():
        own = next((one for one in pair.resumed.ranks[0].steps if one.optimizer == optimizer), None)
        other = step_at(pair, 0, begin, optimizer)
        if own is not None and other is not None:
            mine, theirs = (weights_of(one, with_shards=pair.same_ranks) for one in (own, other))
            compared += sum(name in theirs and digest is not None for name, (digest, _) in mine.items())
            every += len(own.parameters)
            shards = (shard for one in (own, other) for *_, shard in one.facts[STATE]["weights"])
            has_shards |= not pair.same_ranks and any(shards)
    return compared, every, has_shards


def _other_sizes(pair: Resumption) -> str:
    """Return how step sizes differ between numbers of ranks, as with a fixed batch per rank; "" if they do not."""
    if pair.same_ranks:
        return ""
    mine, theirs = (
        max(map(len, _rows_by_step(one, of_each=False).values()), default=0) for one in (pair.resumed, pair.whole)
    )
    if mine == theirs and mine:
        return ""
    ranks = f"{pair.whole.world_size} and {pair.resumed.world_size} ranks"
    if not mine or not theirs:
        return f"the numbers of samples per step on {ranks} are not known"
    return f"a step has {theirs} samples on {pair.whole.world_size} ranks and {mine} on {pair.resumed.world_size}"


def _uses_the_same_samples(pair: Resumption) -> bool:
    """Return whether the resumed training continues with the samples of the whole one, in steps of a different size."""
    mine, theirs = _rows_by_step(pair.resumed, of_each=False), _rows_by_step(pair.whole, of_each=False)
    own = _rows_until(mine[place] for place in sorted(mine))
    expected = _rows_until(theirs[place] for place in sorted(theirs) if place[0] >= pair.begin)
    ends = own.keys() & expected.keys()
    return bool(ends) and all(own[end] == expected[end] for end in ends)


def _rows_until(steps: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """Return the sorted rows of all steps up to the end of each, by their count. Their order over ranks is unknown."""
    rows: list[int] = []
    found = {}
    for step in steps:
        rows = sorted([*rows, *step])
        found[len(rows)] = rows
    return found


def _why_not(
    first: Sequence[RecordedTraining],
    resumed: Sequence[RecordedTraining],
    whole: Sequence[RecordedTraining],
    interrupted: int,
) -> str:
    for found, which in ((first, "interrupted"), (resumed, "resumed"), (whole, "uninterrupted")):
        if len(found) != 1:
            return f"the {which} command ran {counted(len(found), 'recorded training')}; it must run exactly one"
        if not all(rank.steps and all(STATE in step.facts for step in rank.steps) for rank in found[0].ranks):
            return f"the {which} training recorded no state"
    if first[0].world_size != resumed[0].world_size:
        own, others = ({*weights_of(one[0].ranks[0].steps[0], with_shards=False)} for one in (resumed, whole))
        if not own & others:
            return (
                f"on {first[0].world_size} and {resumed[0].world_size} ranks the optimizers have no whole parameter in "
                "common, because the model is sharded; resume on the same number of ranks"
            )
    for rank, other in zip(first[0].ranks, whole[0].ranks, strict=False):
        for one, again in zip(rank.steps, other.steps, strict=False):
            if not same_weights(one, again, with_shards=True):
                return (
                    f"two trainings with the same command have different weights before step {one.number}: set all "
                    "seeds, and use deterministic algorithms"
                )
    if any(rank.steps[-1].number < interrupted for rank in whole[0].ranks):
        return f"the uninterrupted training ended before step {interrupted}"
    return ""


def _begins(whole: RecordedTraining, resumed: RecordedTraining, interrupted: int, optimizer: int) -> list[int]:
    """Return the steps of the whole training that begin, on all ranks, with the weights of the first resumed step."""
    found: set[int] | None = None
    with_shards = whole.world_size == resumed.world_size
    for rank in resumed.ranks:
        own = next((step for step in rank.steps if step.optimizer == optimizer), None)
        if own is None:
            continue
        other = next((one for one in whole.ranks if one.rank == rank.rank), whole.ranks[0])
        same = {
            step.number
            for step in other.steps
            if step.optimizer == optimizer
            and 0 < step.number <= interrupted
            and same_weights(own, step, with_shards=with_shards)
        }
        found = same if found is None else found & same
    return sorted(found or ())


def _weights(pair: Resumption, optimizer: int) -> Finding:
    """Return the finding about initial weights of the resumed training that match no step of the whole one."""
    firsts = [next(one for one in rank.steps if one.optimizer == optimizer) for rank in pair.resumed.ranks]

    def with_weights_after(taken: int) -> list[int]:
        """Return the ranks that begin with the weights of the whole training after so many steps."""
        return [
            rank
            for rank, own in enumerate(firsts)
            if (whole := step_at(pair, rank, taken, optimizer)) is not None
            and same_weights(own, whole, with_shards=pair.same_ranks)
        ]

    fresh, loaded = with_weights_after(0), with_weights_after(pair.interrupted)
    where = {"step": pair.interrupted, "family": "checkpoint"}
    if len(fresh) == len(firsts):
        return failed_with_hint(
            CHECK, "the resumed training begins with the initial weights, not with saved ones", _LOADED_NOTHING,
            cause="weights-not-loaded", **where,
        )  # fmt: skip
    if loaded and len(loaded) < len(firsts):
        others = sorted({*range(len(firsts))} - {*loaded})
        return failed_with_hint(
            CHECK, f"the saved weights are loaded on some ranks, but not on {ranks_in_words(others)}",
            "load the checkpoint on every rank, or broadcast the weights", cause="loaded-on-some-ranks",
            rank=others[0], **where,
        )  # fmt: skip
    name, distance = _worst(firsts[0], step_at(pair, 0, pair.interrupted, optimizer), with_shards=pair.same_ranks)
    if name is None:
        return not_judged(
            CHECK,
            f"no weights could be compared with those before step {pair.interrupted} of the uninterrupted training",
        )
    if distance < ROUNDING:
        return not_judged(CHECK, "weights are those of the saved step up to rounding: use deterministic algorithms")
    return failed_with_hint(
        CHECK,
        "the resumed training begins with weights that match no step of the uninterrupted one on all ranks; they "
        f"differ from those before step {pair.interrupted} by {in_two_digits(distance)} of their norm",
        "check that all weights are saved, in their own dtype, and that nothing changes them after loading",
        cause="weights-of-another-step", parameter=name, **where,
    )  # fmt: skip


def _worst(own: RecordedStep, other: RecordedStep | None, *, with_shards: bool) -> tuple[str | None, float]:
    worst: tuple[str | None, float] = (None, 0.0)
    theirs = {} if other is None else weights_of(other, with_shards=with_shards)
    for name, (_, mine) in weights_of(own, with_shards=with_shards).items():
        expected = theirs.get(name, (None, None))[1]
        if mine is not None and expected is not None:
            left, right = torch.tensor(mine), torch.tensor(expected)
            distance = float((left - right).norm() / right.norm().clamp_min(1e-30))
            worst = max(worst, (name[0], distance), key=lambda one: one[1])
    return worst


def _settings(pair: Resumption) -> Finding | None:
    for place, rank, expected, step in pair.pairs():
        groups = zip(step.facts[STATE]["groups"], expected.facts[STATE]["groups"], strict=False)
        for index, (mine, theirs) in enumerate(groups):
            numbers = [name for name in theirs if isinstance(theirs[name], float) and isinstance(mine.get(name), float)]
            keys = [name for name in numbers if not math.isclose(mine[name], theirs[name], rel_tol=SAME_SETTING)]
            if not keys:
                continue
            name = "lr" if "lr" in keys else keys[0]
            begun = step_at(pair, rank, place, step.optimizer)
            again = begun is not None and any(
                one.get(name) == mine[name] for one in begun.facts[STATE]["groups"][index : index + 1]
            )
            what = "the learning rate" if name == "lr" else name
            return failed_with_hint(
                CHECK,
                f"{what} is {mine[name]:.6g} in step {place} after the restart"
                + (" (its value at the start of training)" if again and place < pair.begin else "")
                + f", but {theirs[name]:.6g} in step {pair.begin + place} of the uninterrupted training",
                "save and load the scheduler's state_dict, and let it continue at the saved step"
                if name == "lr"
                else f"save the optimizer's state_dict, which holds {name} in its param_groups, and load it",
                cause="scheduler-not-restored" if again and name == "lr" else "rates-not-restored",
                family="checkpoint", step=pair.begin + place, rank=rank,
            )  # fmt: skip
    return None


def _samples(pair: Resumption) -> Finding | None:
    """Compare the rows of each step: per rank or, on a different number of ranks, over all ranks together."""
    mine, theirs = _rows_by_step(pair.resumed, pair.same_ranks), _rows_by_step(pair.whole, pair.same_ranks)
    resumed = sorted(mine)
    for place, rank in resumed:
        expected = theirs.get((pair.begin + place, rank))
        if expected is None or not expected or mine[place, rank] == expected:
            continue
        offset = next((one for one in sorted({number for number, _ in theirs}) if _begins_at(one, mine, theirs)), None)
        known = {row for rows in theirs.values() for row in rows}
        if offset is None and not known.intersection(mine[place, rank]):
            return None  # the model's inputs are drawn at random, as noise and masks are
        cause, what = _position(offset, pair.begin)
        return failed_with_hint(
            CHECK, f"step {place} after the restart uses different samples than step {pair.begin + place} of the "
            f"uninterrupted training: {what}",
            "save the epoch and the position in it; on resuming, call set_epoch, and skip the batches that were used",
            cause=cause, family="checkpoint", step=pair.begin + place, rank=rank if pair.same_ranks else None,
        )  # fmt: skip
    return None


def _begins_at(
    offset: int, mine: Mapping[tuple[int, int], list[int]], theirs: Mapping[tuple[int, int], list[int]]
) -> bool:
    """Return whether resumed steps have the rows of the whole training from step ``offset`` on, as far as known."""
    known = [place for place in mine if (offset + place[0], place[1]) in theirs]
    enough = min(2, len({step for step, _ in mine}))
    return len({step for step, _ in known}) >= enough and all(
        theirs[offset + s, rank] == mine[s, rank] for s, rank in known
    )


def _position(offset: int | None, begin: int) -> tuple[str, str]:
    if offset is None:
        return "order-drawn-anew", "their order was drawn again, or begins at another position in the epoch"
    if offset == 0:
        return "trained-all-over-again", "the samples of the first steps, which are used twice"
    if offset < begin:
        return "batch-again-after-resuming", f"the samples from step {offset} on, so some are used twice"
    return "batch-left-out-after-resuming", f"the samples from step {offset} on, so some are skipped"


def _rows_by_step(training: RecordedTraining, of_each: bool) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for rank in training.ranks:
        for step in rank.steps:
            if not step.optimizer:
                found.setdefault((step.number, rank.rank if of_each else 0), []).extend(_rows(step))
    return found if of_each else {place: sorted(rows) for place, rows in found.items()}


def _rows(step: RecordedStep) -> list[int]:
    forwards = [one for each in step.passes for one in each.noted("batches").get("forwards", ())]
    return [row for one in forwards if one.get("training", True) for row in one.get("hashes", ())]


def _loss_scale(pair: Resumption) -> Finding | None:
    for place, rank, expected, step in pair.pairs():
        mine, theirs = ({one.scale for one in each.passes} for each in (step, expected))
        if mine and theirs and mine != theirs:
            return failed_with_hint(
                CHECK,
                f"the loss scale is {scale_text(max(mine))} in step {place} after the restart, and "
                f"{scale_text(max(theirs))} in step {pair.begin + place} of the uninterrupted training",
                "save and load the GradScaler's state_dict", cause="scale-not-restored", family="checkpoint",
                step=pair.begin + place, rank=rank,
            )  # fmt: skip
    return None


def _draws_otherwise(pair: Resumption) -> bool:
    return pair.same_ranks and any(
        _drawn_from(step) != _drawn_from(expected) for _, _, expected, step in pair.pairs() if _drawn_from(expected)
    )


def _drawn_from(step: RecordedStep) -> list[Mapping[str, str]]:
    forwards = [one for each in step.passes for one in each.noted("generators").get("forwards", ())]
    return [{name: one["states"][name] for name in one["drew"]} for one in forwards if one["drew"]]
