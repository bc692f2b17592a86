"""The launches of one measured cell, round by round, paired with rounds of the hand-written loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from plumbline.benchmark.launch_metrics import LaunchSample
from plumbline.benchmark.timed_launch import TimedLaunch, TimedLaunchError
from plumbline.core.outcome import Outcome

Begin = Callable[[int], TimedLaunch]
"""Begins the launch of a number, counted from 0."""

T = TypeVar("T")


class PairedRounds:
    """``rounds`` rounds of a launch, then those of the next: ``prepare`` and ``round`` for each, then ``finish_round``.

    Only ``round`` is to be timed. The yardstick's rounds are paired with the cell's, one before, one after, one before,
    …: a machine that grows slower slows both equally. ``launches`` has the ones that are over. Where a method raises
    (``TimedLaunchError``, ``LaunchError``), ``close`` ends what still runs.
    """

    def __init__(self, begin: Begin, yardstick: Begin | None, rounds: int) -> None:
        self.launches: list[LaunchSample] = []
        self._begin = begin
        self._begin_yardstick = yardstick
        self._rounds = rounds
        self._done = 0
        self._unfinished = False
        self._timed: TimedLaunch | None = None
        self._yardstick: TimedLaunch | None = None

    def prepare(self) -> None:
        """Do what comes before a round: begin a new launch or train the yardstick's round, if it is their turn."""
        self.finish_round()
        if self._done == 0:
            number = len(self.launches)
            self._timed = self._begin(number)
            if self._begin_yardstick is not None:
                self._yardstick = _blaming_yardstick(partial(self._begin_yardstick, number))
        if self._done % 2 == 0:
            self._train_yardstick()

    def round(self) -> None:
        assert self._timed is not None
        self._unfinished = True
        self._timed.round()

    def finish_round(self) -> None:
        """Do what comes after a round, once; ``prepare`` does it for the round before."""
        if not self._unfinished:
            return
        self._unfinished = False
        if self._done % 2 == 1:
            self._train_yardstick()
        self._done += 1
        if self._done == self._rounds:
            self._end_launch()

    def close(self) -> None:
        for timed in (self._timed, self._yardstick):
            if timed is not None:
                timed.close()
        self._timed = self._yardstick = None

    def _train_yardstick(self) -> None:
        if self._yardstick is not None:
            _blaming_yardstick(self._yardstick.round)

    def _end_launch(self) -> None:
        assert self._timed is not None
        self._timed.profile()
        timed = self._timed.end()
        yardstick = None if self._yardstick is None else _blaming_yardstick(self._yardstick.end)
        self.launches.append(LaunchSample(timed, yardstick))
        self._done, self._timed, self._yardstick = 0, None, None


def _blaming_yardstick(do: Callable[[], T]) -> T:
    try:
        return do()
    except TimedLaunchError as failed:
        message = f"the hand-written loop that it is compared with failed: {failed.finding.message}"
        finding = replace(failed.finding, outcome=Outcome.ERRORED, message=message)
        raise TimedLaunchError(finding, failed.folder) from failed
