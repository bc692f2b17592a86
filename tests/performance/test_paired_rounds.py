"""A cell's rounds alternate with those of the hand-written loop, and a failure of either ends both."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.benchmark.timed_launch import PairedRounds, TimedLaunchError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome


class Noting:
    """Stands in for a group: records what it is asked, and when; fails in its round ``failing``."""

    def __init__(self, name, notes, failing=None):
        self.name, self.notes, self.failing = name, notes, failing
        self.rounds = 0

    def round(self):
        self.rounds += 1
        self.notes.append(self.name)
        if self.rounds == self.failing:
            raise TimedLaunchError(Finding("performance", Outcome.CRASHED, "rank 0: killed", rank=0), Path("there"))

    def profile(self):
        self.notes.append(f"{self.name} profiles")

    def end(self):
        self.notes.append(f"{self.name} ends")
        return self.name

    def close(self):
        self.notes.append(f"{self.name} is closed")


def turns_of(notes, rounds, *, failing=None, failing_by_hand=None):
    return PairedRounds(
        lambda number: Noting(f"cell {number}", notes, failing),
        lambda number: Noting(f"hand {number}", notes, failing_by_hand),
        rounds,
    )


def drive(turns, times):
    for _ in range(times):
        turns.prepare()
        turns.round()
    turns.finish_round()


def test_neighbours_are_paired_and_neither_always_comes_first():
    notes = []
    turns = turns_of(notes, 4)
    drive(turns, 8)
    one = ["hand", "cell", "cell", "hand", "hand", "cell", "cell", "hand"]
    for number in (0, 1):
        here = [note for note in notes if note.endswith(f" {number}")]
        assert here == [f"{name} {number}" for name in one]
    assert [(launch.timed, launch.yardstick) for launch in turns.launches] == [
        ("cell 0", "hand 0"),
        ("cell 1", "hand 1"),
    ]


def test_a_launch_is_over_before_the_next_begins_and_is_profiled_once():
    notes = []
    drive(turns_of(notes, 2), 4)
    assert notes.index("cell 0 ends") < notes.index("cell 1")
    assert notes.index("hand 0 ends") < notes.index("hand 1")
    assert notes.count("cell 0 profiles") == notes.count("cell 1 profiles") == 1
    assert "hand 0 profiles" not in notes


def test_without_a_loop_by_hand_the_cell_trains_alone():
    notes = []
    turns = PairedRounds(lambda number: Noting("cell", notes), None, 2)
    drive(turns, 2)
    assert notes == ["cell", "cell", "cell profiles", "cell ends"]
    assert turns.launches[0].yardstick is None


def test_what_goes_wrong_by_hand_is_no_fault_of_the_trainer():
    notes = []
    turns = turns_of(notes, 4, failing_by_hand=2)
    with pytest.raises(TimedLaunchError, match="hand-written loop") as failed:
        drive(turns, 4)
    assert failed.value.finding.outcome is Outcome.ERRORED
    turns.close()
    assert {"cell 0 is closed", "hand 0 is closed"} <= set(notes)


def test_what_goes_wrong_in_the_cell_is_said_as_it_is():
    turns = turns_of([], 4, failing=3)
    with pytest.raises(TimedLaunchError) as failed:
        drive(turns, 4)
    assert failed.value.finding.outcome is Outcome.CRASHED
    assert turns.launches == []
