"""Failures as SARIF and as GitHub Actions annotations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sarif_pydantic import Sarif

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.report.annotations import Annotation, github_commands
from plumbline.report.for_programs import annotations_of, run_commands, run_sarif
from plumbline.results.records import Expected, Result, SourceLine
from plumbline.results.run import Run

TRAINER = SourceLine(file="my trainers/ddp.py", line=12)


@pytest.fixture
def run(realistic_run: Run) -> Run:
    """A run whose first subject is in a user's file."""
    return dataclasses.replace(
        realistic_run, header=realistic_run.header.model_copy(update={"sources": {"reference": TRAINER}})
    )


def test_each_cause_of_a_subject_is_one_annotation_at_its_function(run: Run) -> None:
    named = {one.rule: one for one in annotations_of(run)}
    assert set(named) == {"sum-instead-of-mean", "crashed: launch"}
    summed = named["sum-instead-of-mean"]
    assert summed.source == (TRAINER.file, TRAINER.line)
    assert summed.details["parameter"] == "tower.0.weight"
    assert len(summed.details["cells"]) > 1
    assert "reproduce: pytest suites/ -k" in summed.message


def test_two_reasons_of_one_title_have_two_keys(run: Run, cells: list[Cell]) -> None:
    def crashed(cell: Cell, message: str) -> Result:
        return Result.of(cell, Finding("launch", Outcome.CRASHED, message), "pytest", 0.1)

    results = (crashed(cells[0], "killed by signal 9"), crashed(cells[1], "out of memory"))
    found = annotations_of(dataclasses.replace(run, results=results))
    assert [one.rule for one in found] == ["crashed: launch"] * 2
    assert len({one.key for one in found}) == 2


def test_sarif_has_a_rule_and_a_place_for_each_result(run: Run) -> None:
    written = json.loads(run_sarif(run))
    # The models ignore unknown names, and do not write them again.
    assert Sarif.model_validate(written).model_dump(mode="json", by_alias=True, exclude_none=True) == written
    (log,) = written["runs"]
    rules = [rule["id"] for rule in log["tool"]["driver"]["rules"]]
    assert [rules[result["ruleIndex"]] for result in log["results"]] == [one["ruleId"] for one in log["results"]]
    place = log["results"][0]["locations"][0]["physicalLocation"]
    assert place == {
        "artifactLocation": {"uri": "my%20trainers/ddp.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 12},
    }
    assert log["invocations"] == [{"executionSuccessful": True}]


def test_github_shows_it_at_the_line(run: Run) -> None:
    lines = run_commands(run).splitlines()
    assert len(lines) == len(annotations_of(run))
    assert all(line.startswith("::error file=my trainers/ddp.py,line=12,title=reference%3A ") for line in lines)


def test_without_a_file_there_is_an_annotation_all_the_same(realistic_run: Run) -> None:
    assert run_commands(realistic_run).startswith("::error title=reference%3A ")
    assert "locations" not in json.loads(run_sarif(realistic_run))["runs"][0]["results"][0]


def test_an_expectation_that_is_not_met_is_shown_at_its_entry(run: Run, cells: list[Cell]) -> None:
    entry = SourceLine(file="expectations/reference.toml", line=3)
    expected = Expected(outcome=Outcome.FAILED, reason="it is known", entry="reference.toml, entry 1", source=entry)
    results = tuple(
        one.model_copy(update={"expected": expected}) if one.cell == cells[0].id else one for one in run.results
    )
    annotations = annotations_of(dataclasses.replace(run, results=results))
    found = [one for one in annotations if one.source == (entry.file, entry.line)]
    assert len(found) == 1
    assert "it is known" in found[0].message


@given(st.text(), st.text(), st.text())
def test_text_of_a_run_is_never_a_command(title: str, message: str, file: str) -> None:
    hostile = Annotation("rule", f"{title}\n::stop::", f"{message}\r\n::error::x", "key", (file, 1))
    (line,) = github_commands([hostile]).split("\n")[:-1]
    command, properties, *_ = line.split("::")[1:]
    assert command.startswith("error file=")
    assert "::stop" not in command
    assert properties is not None


def test_a_run_in_which_all_is_right_has_no_result(build_run: Callable[..., Run], cells: list[Cell]) -> None:
    right = build_run({cells[0]: [Outcome.PASSED]})
    assert run_commands(right) == ""
    assert json.loads(run_sarif(right))["runs"][0]["results"] == []
