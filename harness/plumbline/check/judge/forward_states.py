"""Checks the buffers and the random generators with which ranks begin a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import (
    IF_INTENDED,
    aligned_forwards,
    failed_observers,
    forwards_of,
    headline_note,
    information,
)
from plumbline.check.judge.rank_weights import rank_layout
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.checks.buffers import CHECK, not_broadcast
from plumbline.judge.findings import failed_with_hint, passed
from plumbline.report.text import listed


def judge_buffers(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a failure for running statistics that hold NaN, and one finding about the ranks' buffers."""
    yield from failed_observers(training, "buffers", CHECK)
    lost = _not_a_number(training)
    if lost is not None:
        yield lost
    compared = broadcast = differ = 0
    for place, forwards in aligned_forwards(training, "buffers"):
        compared += 1
        differing = _differing(forwards)
        differ += bool(differing)
        if all(forward["broadcast"] for forward in forwards):
            broadcast += 1
            if differing:
                yield _not_broadcast(training, place, forwards, differing)
                return
    if compared and not lost:
        yield _what_ranks_begin_with(compared, broadcast, differ, training.world_size)


def _not_a_number(training: RecordedTraining) -> Finding | None:
    """Return the failure of running statistics that hold NaN, which no later average removes."""
    for rank in training.ranks:
        noted = [(step.number, step.facts["buffers"]["nan"]) for step in rank.steps if "buffers" in step.facts]
        for number, names in noted:
            if names:
                return failed_with_hint(
                    CHECK,
                    f"running statistics hold NaN after the step ({counted(len(names), 'buffer')})",
                    "find the input or the activation that overflows; running statistics stay NaN, and so does every "
                    "evaluation",
                    family="buffers",
                    step=number,
                    rank=rank.rank,
                    parameter=names[0],
                )
    return None


def _differing(forwards: Sequence[Facts]) -> list[str]:
    first, *others = [forward["buffers"] for forward in forwards]
    return [name for name, (bits, _) in first.items() if any(o.get(name, (bits,))[0] != bits for o in others)]


def _not_broadcast(
    training: RecordedTraining, place: int, forwards: Sequence[Facts], differing: Sequence[str]
) -> Finding:
    name = differing[0]
    first = forwards[0]["buffers"][name]
    rank = next(i for i, forward in enumerate(forwards) if forward["buffers"].get(name, first)[0] != first[0])
    number = training.ranks[rank].rank
    return not_broadcast(
        differing,
        len(forwards[0]["buffers"]),
        number,
        "DistributedDataParallel broadcasts them, so check for code that sets buffers in a forward hook, or while the "
        "wrapper is called",
        forward=f"forward {place}",
        norms=f" (norm {first[1]} on rank 0, {forwards[rank]['buffers'][name][1]} on rank {number})",
    )


def _what_ranks_begin_with(compared: int, broadcast: int, differ: int, world: int) -> Finding:
    if not differ:
        return passed(CHECK, f"all {world} ranks begin {counted(compared, 'forward')} with the same buffers")
    if broadcast:
        return information(
            CHECK,
            f"ranks begin with the same buffers in the {broadcast} of {counted(compared, 'forward')} that follow a "
            f"broadcast, and with different buffers in {differ} of the others",
        )
    return information(
        CHECK,
        f"each rank uses its own buffers in {differ} of {compared} forwards, because nothing broadcasts them: running "
        "statistics come from the rank's own samples, and a checkpoint contains those of the rank that saves it",
    )


RNG = "rng"


def judge_generator_states(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is known about the generators; equal ones are no failure, since many libraries seed ranks alike."""
    yield from failed_observers(training, "generators", RNG)
    for rank in training.ranks[:1]:
        idle, noisy = (
            [name for step in rank.steps[-1:] for name in step.noted("generators").get(kind, ())]
            for kind in ("idle", "noisy")
        )
        if noisy:
            yield information(
                RNG,
                f"a frozen module, such as a teacher or a reference model, is called without gradients in training "
                f"mode, so {counted(len(noisy), 'dropout module')} in it {'drops' if len(noisy) == 1 else 'drop'} "
                f"values: {listed(noisy)}. If this is not intended, call eval() on it",
            )
        if idle:
            yield headline_note(
                RNG,
                f"A module is trained in evaluation mode, so {counted(len(idle), 'dropout module')} in it "
                f"{'drops' if len(idle) == 1 else 'drop'} nothing: {listed(idle)}. If this is not intended, call "
                "train() before the forward, and call eval() on no other module that shares these.",
            )
    if len(training.ranks) < 2:
        return
    count, drawing, alike, between = 0, 0, 0, 0
    for _, forwards in aligned_forwards(training, "generators"):
        drew = set.intersection(*(set(forward["drew"]) for forward in forwards))
        count += 1
        drawing += bool(drew)
        alike += any(_are_same(forwards, name) for name in drew)
        before = set.intersection(*(set(forward.get("between", ())) for forward in forwards))
        between += any(_are_same(forwards, name) for name in before)
    # A new pass through a loader draws, too.
    first = {one["pass"] for forward in forwards_of(training.ranks[0], "batches") if (one := forward["fetched"])}
    if not alike and 2 * (between - len(first)) > count - len(first) and rank_layout(training).is_data_parallel:
        yield information(
            RNG,
            f"the script draws the same random numbers on all ranks before {between} of {counted(count, 'forward')}. "
            "Noise, masks and augmentations of samples are then the same on every rank, unless each rank takes its own "
            "part of them. To make them independent, draw them from a generator with the seed seed + rank. Noise for "
            "weights must be the same on all ranks",
        )
        return
    if not drawing:
        return
    different = f"no random generator has the same state on all ranks ({counted(drawing, 'forward')})"
    same = (
        f"random generators have the same state on all ranks in {alike} of {counted(drawing, 'forward')}, so random "
        "layers such as dropout draw the same numbers on every rank"
    )
    layout = rank_layout(training)
    if not layout.is_data_parallel:  # ranks that hold copies of one activation have to draw the same numbers
        yield information(RNG, f"{same if alike else different}; {IF_INTENDED}{layout.reason}")
    elif alike:
        yield information(RNG, f"{same}; seed each rank with seed + rank to make them independent")
    else:
        yield passed(RNG, different)


def _are_same(forwards: Sequence[Facts], name: str) -> bool:
    return len({forward["states"][name] for forward in forwards}) == 1
