"""Titles of causes: each cause exists, and its title is readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from plumbline.core.titles import TITLES, heading, title_of, unexplained_title

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sources():
    files = (ROOT / "harness" / "plumbline").rglob("*.py")
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.name != "titles.py")


@pytest.mark.parametrize("cause", TITLES)
def test_it_is_for_a_cause_that_is_given(cause, sources):
    assert f'"{cause}"' in sources


@pytest.mark.parametrize(
    ("title", "shown"),
    [
        (title_of("not-synchronised"), "Not synchronised"),
        (title_of("set-epoch-never-called"), "set_epoch is never called"),
        (title_of("some-zero"), "Some gradients are zero"),
        (unexplained_title("gradients"), "Gradients are wrong, cause unknown"),
        (unexplained_title("mine"), "Mine failed, cause unknown"),
    ],
)
def test_a_title_begins_with_a_capital_unless_it_begins_with_code(title, shown):
    assert heading(title) == shown
