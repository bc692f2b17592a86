"""The suite is run where it is asked for by its path, and only there; its score counts what it should."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SUITES = Path(__file__).parents[2] / "suites"
FILE = "detection/test_detection.py"


def collected(pytester, *arguments):
    """The number of detection tests that pytest collects, run from a folder that is not the project's."""
    options = ("--collect-only", "-q", "--import-mode=importlib", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*arguments, *options, timeout=120)
    return sum("::test_detection[" in line for line in result.outlines)


def test_the_suites_together_leave_it_out(pytester):
    assert collected(pytester, str(SUITES), "-k", "test_detection or smoke") == 0


@pytest.mark.parametrize(
    "named", ["detection", "detection/test_detection.py", "detection/test_detection.py::test_detection"]
)
def test_its_own_path_runs_it(pytester, named):
    assert collected(pytester, str(SUITES / named), "-k", "averaging") > 10


def test_its_own_path_beside_another_runs_it(pytester):
    found = collected(pytester, str(SUITES / "conformance"), str(SUITES / "detection"), "-k", "averaging")
    assert found > 10


@pytest.fixture
def score():
    spec = importlib.util.spec_from_file_location("detection_score", SUITES / "detection" / "score.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["detection_score"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["detection_score"]


def test_a_trainer_counts_as_caught_if_all_of_its_cells_are(score):
    def one(trainer, cell, caught, named=True, family="sync", unseen=False, steps=1):
        return score.Tried(family, trainer, cell, caught, named, unseen, steps)

    lines = score.table(
        [
            one("a", "1", True),
            one("a", "2", True, named=False, steps=3),
            one("b", "1", True),
            one("b", "2", False, named=False, steps=None),
            one("c", "1", False, named=False, unseen=True, family="metrics", steps=None),
            one("good", "1", False, family="right", steps=None),
            one("alarm", "1", True, family="right"),
        ]
    )
    assert "trainers: caught 1 of 2, family right 0 of 2, false alarms 1 of 2" in lines
    assert "cells: caught 3 of 4, family right 2 of 4, false alarms 1 of 2" in lines
    assert "not examined yet: c" in lines
    assert "steps needed: 1 in the median, 3 at most" in lines
    assert "| sync | 2 | 4 | 3 | 2 | 1 | 3 |" in lines
