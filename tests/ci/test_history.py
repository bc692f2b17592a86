"""Tests of old releases: which lines run, what counts as expected, and when an environment is complete."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.software import Software
from plumbline.workloads import WORKLOADS

CI = Path(__file__).parents[2] / "ci"


@pytest.fixture(scope="module")
def history(program):
    return program(CI / "history.py")


@pytest.fixture
def pairs(history):
    with (CI / "history" / "pairs.csv").open(newline="") as lines:
        return [history.Pair(**line) for line in csv.DictReader(lines)]


def asked(**options):
    names = ("only", "library", "bad", "good", "subject", "cell", "family", "cause")
    return argparse.Namespace(**{**dict.fromkeys(names), **options})


def test_every_line_names_a_cell_and_a_subject_that_there_are(pairs):
    assert pairs
    for pair in pairs:
        assert pair.cell.rsplit("-", 3)[0] in WORKLOADS
        file = pair.subject.partition("::")[0]
        assert not file.endswith(".py") or (CI / "history" / file).is_file()


def test_a_word_selects_lines(history, pairs):
    assert [pair.library for pair in history.chosen(pairs, asked(only=["2694"]))] == ["accelerate"]
    assert history.chosen(pairs, asked()) == pairs


def test_other_versions_take_a_librarys_cells(history, pairs):
    (pair,) = history.chosen(pairs, asked(library="accelerate", bad="0.26.1"))
    assert (pair.bad, pair.good, pair.cause) == ("0.26.1", "1.0.1", "shards-overlap")


def test_another_cell_brings_no_cause_along(history, pairs):
    (pair,) = history.chosen(pairs, asked(library="accelerate", cell="accumulation-ddp-1x2-32", family="accumulation"))
    assert (pair.family, pair.cause) == ("accumulation", "")


def test_the_bad_version_must_be_told_its_own_mistake(history, pairs):
    (pair,) = history.chosen(pairs, asked(only=["2694"]))
    right = Finding("samples", Outcome.FAILED, "", cause="shards-overlap", family="data")
    other = Finding("gradients", Outcome.FAILED, "", cause="not-zeroed", family="accumulation")
    passed = Finding("launch", Outcome.PASSED, "")
    assert history.Verdict.of(pair, pair.bad, [passed, other, right]).as_expected
    assert not history.Verdict.of(pair, pair.bad, [passed, other]).as_expected
    assert not history.Verdict.of(pair, pair.bad, [passed]).as_expected


def test_the_good_version_must_have_nothing_bad(history, pairs):
    pair = pairs[0]
    crashed = Finding("launch", Outcome.CRASHED, "")
    assert history.Verdict.of(pair, pair.good, [Finding("launch", Outcome.PASSED, "")]).as_expected
    assert not history.Verdict.of(pair, pair.good, [crashed]).as_expected


KNOWN = """
[[expected]]
check = "gradients"
versions = "==2.*"
reason = "so it is"
"""


def test_the_good_version_may_have_what_is_known_of_it(history, cell_of, monkeypatch, tmp_path):
    (tmp_path / "simulated.toml").write_text(KNOWN)
    monkeypatch.setattr(history, "EXPECTATIONS", tmp_path)
    wrong = Finding("gradients", Outcome.FAILED, "")
    passed, other = Finding("gradients", Outcome.PASSED, ""), Finding("samples", Outcome.FAILED, "")
    cell = cell_of("mlp", "none", "1x1")
    assert history.unknown(cell, [wrong, other], Software("simulated", "2.1")) == [other]
    assert history.unknown(cell, [wrong, other], Software("simulated", "3.0")) == [wrong, other]
    assert history.unknown(cell, [passed], Software("simulated", "2.1")) == [passed]


def test_an_unnamed_cause_is_any_but_unexplained(history, pairs):
    (pair,) = history.chosen(pairs, asked(library="accelerate", family="data"))
    told = [
        Finding("samples", Outcome.FAILED, "", cause=cause, family="data") for cause in ("unexplained", "any-other")
    ]
    assert not history.Verdict.of(pair, pair.bad, told[:1]).as_expected
    assert history.Verdict.of(pair, pair.bad, told).as_expected


def test_an_environment_is_made_once_and_again_where_it_is_not_whole(history, monkeypatch, tmp_path):
    ran = []

    def run(*command):
        ran.append(command)
        if "venv" in command:
            command[-1].mkdir()
        if "broken" in command:
            raise RuntimeError

    monkeypatch.setattr(history, "_run", run)
    python = history.environment(tmp_path / "env", ["library==1"])
    assert len(ran) == 2
    assert history.environment(tmp_path / "env", ["library==1"]) == python
    assert len(ran) == 2
    with pytest.raises(RuntimeError):
        history.environment(tmp_path / "env", ["broken"])
    assert not (tmp_path / "env" / "requirements.txt").exists()
