"""Parsers answer as documented, even if a byte of a valid input changes."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
FILE = ROOT / "ci" / "fuzz" / "targets.py"
SPEC = importlib.util.spec_from_file_location("fuzz_targets", FILE)
targets = sys.modules["fuzz_targets"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(targets)


def test_the_page_that_security_md_names_has_every_parser() -> None:
    rows = re.findall(r"^\| ([\w-]+) \|.*?\| (\d+) \|", (ROOT / "reports" / "fuzz.md").read_text(), re.MULTILINE)
    assert {name for name, inputs in rows if int(inputs) >= 100_000} >= targets.TARGETS.keys()


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_damaged_input_is_answered_as_promised(name):
    target = targets.TARGETS[name]
    seeds = target.seeds()
    for seed in seeds:
        target.parse(seed)

    @settings(database=None)
    @given(st.sampled_from(seeds), st.integers(0, 2**32), st.binary(max_size=4), st.integers(0, 8))
    def damaged(seed, place, noise, lost):
        place %= len(seed) + 1
        target.answer(seed[:place] + noise + seed[place + lost :])

    damaged()
