"""Whether the ranks draw different random numbers in their forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plumbline.check.evidence.training import Facts, RecordedTraining
from plumbline.check.judge.noted import IF_INTENDED, aligned_forwards, failed_observers, forwards_of, information
from plumbline.check.judge.rank_layout import rank_layout
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.findings import passed

CHECK = "rng"


def judge_generator_states(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is known about the generators; equal ones are no failure, since many libraries seed ranks alike."""
    yield from failed_observers(training, "generators", CHECK)
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
            CHECK,
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
        yield information(CHECK, f"{same if alike else different}; {IF_INTENDED}{layout.reason}")
    elif alike:
        yield information(CHECK, f"{same}; seed each rank with seed + rank to make them independent")
    else:
        yield passed(CHECK, different)


def _are_same(forwards: Sequence[Facts], name: str) -> bool:
    return len({forward["states"][name] for forward in forwards}) == 1
