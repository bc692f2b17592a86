"""The launches of one cell, a round at a time, with the hand-written loop's rounds between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from harness.benchmark.launch_metrics import LaunchSample
from harness.benchmark.timed_launch import TimedLaunch, TimedLaunchError
from harness.core.outcome import Outcome

Begin = Callable[[int], TimedLaunch]
"""Begins a launch, which is told its number."""

T = TypeVar("T")


class PairedRounds:
    """``rounds`` rounds of a launch, then those of the next one. For each ``prepare``, then ``round``; last ``settle``.

    ``round`` alone is what is to be timed. The yardstick's rounds are paired with the cell's, one before, one after,
    one before, …: a machine that grows slower all the while is as slow for one as for the other. ``launches`` has those
    that are over. Where it raises (``GroupError``, ``LaunchError``) nothing of it goes on running.
    """

    def __init__(self, begin: Begin, yardstick: Begin | None, rounds: int) -> None:
        self.launches: list[LaunchSample] = []
        self._begin = begin
        self._begin_yardstick = yardstick
        self._rounds = rounds
        self._done = 0
        self._unsettled = False
        self._group: TimedLaunch | None = None
        self._yardstick: TimedLaunch | None = None

    def prepare(self) -> None:
        """Make everything ready for a round: a new launch, or the yardstick's round, if it is their turn."""
        self.settle()
        if self._done == 0:
            number = len(self.launches)
            self._group = self._begin(number)
            if self._begin_yardstick is not None:
                self._yardstick = _by_hand(partial(self._begin_yardstick, number))
        if self._done % 2 == 0:
            self._yardsticks_round()

    def round(self) -> None:
        """Let the cell's ranks train a round."""
        assert self._group is not None
        self._unsettled = True
        self._group.round()

    def settle(self) -> None:
        """Do what is left to do after a round, once; ``prepare`` does it for the one before."""
        if not self._unsettled:
            return
        self._unsettled = False
        if self._done % 2 == 1:
            self._yardsticks_round()
        self._done += 1
        if self._done == self._rounds:
            self._end_launch()

    def close(self) -> None:
        """End whatever is still running."""
        for group in (self._group, self._yardstick):
            if group is not None:
                group.close()
        self._group = self._yardstick = None

    def _yardsticks_round(self) -> None:
        if self._yardstick is not None:
            _by_hand(self._yardstick.round)

    def _end_launch(self) -> None:
        assert self._group is not None
        self._group.look()
        timed = self._group.end()
        yardstick = None if self._yardstick is None else _by_hand(self._yardstick.end)
        self.launches.append(LaunchSample(timed, yardstick))
        self._done, self._group, self._yardstick = 0, None, None


def _by_hand(do: Callable[[], T]) -> T:
    """Return what ``do`` returns; what goes wrong with the yardstick is no fault of the trainer under test."""
    try:
        return do()
    except TimedLaunchError as failed:
        said = f"the hand-written loop beside it went wrong: {failed.finding.message}"
        finding = replace(failed.finding, outcome=Outcome.ERRORED, message=said)
        raise TimedLaunchError(finding, failed.folder) from failed
