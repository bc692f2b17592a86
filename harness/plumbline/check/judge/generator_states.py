"""Whether the ranks draw different random numbers in their forwards."""

from __future__ import annotations

from collections.abc import Iterator

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import IF_INTENDED, aligned_forwards, failed_observers, information
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
    drawing, alike = 0, 0
    for _, forwards in aligned_forwards(training, "generators"):
        drew = set.intersection(*(set(forward["drew"]) for forward in forwards))
        if drew:
            drawing += 1
            alike += any(len({forward["states"][name] for forward in forwards}) == 1 for name in drew)
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
