"""The suite runs only if its path is named, and its score counts correctly."""

from __future__ import annotations

from pathlib import Path

import pytest

SUITES = Path(__file__).parents[2] / "suites"


class InvokedWith:
    """The parts of pytest's configuration about its command line."""

    def __init__(self, folder, *args):
        self.args, self.invocation_params = args, self
        self.dir = folder


@pytest.mark.parametrize(
    ("named", "left_out"),
    [
        (["."], True),
        (["conformance"], True),
        (["detection"], False),
        (["detection/test_detection.py"], False),
        (["detection/test_detection.py::test_detection"], False),
        (["conformance", "detection"], False),
    ],
)
def test_it_is_left_out_unless_it_is_named(program, named, left_out):
    ignores = program(SUITES / "conftest.py").pytest_ignore_collect
    ignored = ignores(SUITES / "detection" / "test_detection.py", InvokedWith(SUITES, *named))
    assert bool(ignored) is left_out
    assert ignores(SUITES / "conformance", InvokedWith(SUITES, *named)) is None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("named", "runs"),
    [
        (["."], False),
        (["detection"], True),
        (["detection/test_detection.py"], True),
        (["detection/test_detection.py::test_detection"], True),
        (["conformance", "detection"], True),
    ],
)
def test_pytest_collects_it_where_it_is_named(pytester, named, runs):
    """From a folder outside the project."""
    options = ("--collect-only", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-k", "averaging or smoke")
    result = pytester.runpytest_subprocess(*(SUITES / name for name in named), *options, timeout=600)
    found = sum("::test_detection[" in line for line in result.outlines)
    assert found > 10 if runs else found == 0


@pytest.fixture(scope="module")
def score(program):
    return program(SUITES / "detection" / "score.py")


def test_a_trainer_counts_as_caught_if_all_of_its_cells_are(score):
    def one(trainer, cell, caught, named=True, family="sync", unseen=False, steps=1, caused=None):
        return score.Tried(family, trainer, cell, caught, named, named if caused is None else caused, unseen, steps)

    lines = score.table(
        [
            one("a", "1", True, caused=False),
            one("a", "2", True, named=False, steps=3),
            one("b", "1", True),
            one("b", "2", False, named=False, steps=None),
            one("c", "1", False, named=False, unseen=True, family="metrics", steps=None),
            one("good", "1", False, family="right", steps=None),
            one("alarm", "1", True, family="right"),
        ]
    )
    assert "trainers: caught 1 of 2, family right 0 of 2, cause right 0 of 2, false alarms 1 of 2" in lines
    assert "cells: caught 3 of 4, family right 2 of 4, cause right 1 of 4, false alarms 1 of 2" in lines
    assert "not examined yet: c" in lines
    assert "steps needed: 1 in the median, 3 at most" in lines
    assert "| sync | 2 | 4 | 3 | 2 | 1 | 1 | 3 |" in lines
    assert "| a | 2 of 2 | none |" in lines


def test_each_mesh_has_margins_of_its_own(score):
    def one(trainer, mesh, caught, error, precision="32"):
        return score.Tried("sync", trainer, "cell", caught, caught, caught, False, 1, precision, error, mesh=mesh)

    right = [one("good", "tp", False, 0.2), one("good", "tp", False, 0.1), one("good", None, False, 0.5)]
    wrong = [one("bad", "tp", True, 20.0), one("bad", "pp", True, 9.0, "bf16"), one("bad", None, True, 5.0)]
    rows = score.margins("mesh, precision", wrong[:2], right[:2], lambda one: (one.mesh, one.precision))
    assert rows[2:] == [
        "| pp, bf16 |  | 9 (1 cells) |  | cell |",
        "| tp, 32 | 0.2 (2 cells) | 20 (1 cells) | 2.0 | cell |",
    ]
    assert "| 32 | 0.5 (3 cells) | 5 (2 cells) | 1.0 | cell |" in score.margins(
        "precision", wrong, right, lambda one: (one.precision,)
    )
