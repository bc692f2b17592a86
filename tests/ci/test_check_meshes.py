"""Mistakes in parallel code: there are enough of each kind, and each names its tracker."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ci" / "check_scripts"


@pytest.fixture(scope="module")
def mistakes() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("mesh_mistakes").MESH_MISTAKES
    finally:
        sys.path.remove(str(FOLDER))


def test_there_are_four_or_more_for_each_parallelism(mistakes: Any) -> None:
    counts = Counter(one.parallelism for one in mistakes)
    assert len(mistakes) >= 40
    assert len(counts) == 10
    assert min(counts.values()) >= 4


def test_each_has_a_name_of_its_own_a_tracker_and_causes(mistakes: Any) -> None:
    assert len({one.script.name for one in mistakes}) == len(mistakes)
    assert all(one.tracker and one.causes for one in mistakes)
    assert all(one.script.is_wrong and one.script.accepted == ("wrong",) for one in mistakes)


def test_those_in_scripts_of_our_own_change_them(mistakes: Any) -> None:
    for one in mistakes:
        if one.base.source == "rewritten":
            for file, pattern, replacement in one.changes:
                text = (FOLDER / "scripts" / file).read_text()
                changed, count = re.subn(pattern, replacement, text)
                assert count, (one.name, pattern)
                compile(changed, file, "exec")
