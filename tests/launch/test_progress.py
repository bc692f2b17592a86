"""A launch is followed by its events only: which processes have ended, how, and which signal comes next."""

from __future__ import annotations

import signal
import time

from plumbline.launch.launch_progress import EXIT_GRACE_S, LaunchProgress, RunningLaunch


def progress_of(ranks=(0, 1), limit=1000.0):
    now = time.monotonic()
    return LaunchProgress(RunningLaunch(1, ranks, now, now + limit))


def event(kind, rank, **values):
    return {"event": kind, "launch": 1, "rank": rank, "at": time.monotonic(), **values}


def exit_of(rank, code=0, evidence=False):
    return event("exit", rank, code=code, steps=3, evidence=evidence, out_of_memory=False)


def test_ranks_that_end_with_evidence_are_done_in_time():
    progress = progress_of()
    for rank in (1, 0):
        progress.update(event("evidence", rank))
        progress.update(exit_of(rank))
    assert progress.is_complete
    assert [(end.rank, end.evidence, end.code, end.limit_reached) for end in progress.ends] == [
        (0, True, 0, False),
        (1, True, 0, False),
    ]


def test_the_others_of_one_that_failed_get_some_seconds_and_then_the_signals():
    progress = progress_of()
    limit = progress.deadline
    progress.update(exit_of(0, code=-9))
    assert progress.deadline <= limit - 900 + EXIT_GRACE_S
    assert progress.escalate() == signal.SIGUSR1
    progress.update(event("late", 1, steps=2, stopped=False))
    assert progress.escalate() == signal.SIGKILL
    assert progress.escalate() == signal.SIGKILL, "again, if its end is not reported"
    progress.update(exit_of(1, code=-9))
    first, second = progress.ends
    assert (first.code, first.limit_reached) == (-9, False)
    assert (second.code, second.steps, second.limit_reached) == (None, 2, False)


def test_what_comes_after_the_limit_counts_as_late():
    progress = progress_of()
    progress.escalate()
    for rank in (0, 1):
        progress.update(event("so_far", rank))
        progress.update(event("evidence", rank))
        progress.update(exit_of(rank, evidence=True))
    assert [(end.evidence, end.code, end.limit_reached) for end in progress.ends] == [(False, None, True)] * 2
