"""A check from outside the package needs only one entry in the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from plumbline.core.finding import Finding, diagnosis, in_reading_order
from plumbline.core.outcome import Outcome
from plumbline.judge.checks import CHECKS
from plumbline.judge.findings import Vacuous, failed, passed
from plumbline.judge.judge import KINDS, Rule, judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.planning.expectation_files import Checks
from plumbline.results.records import Result
from plumbline.workloads import WORKLOADS


def small_weights(analysis):
    """Return a finding about the largest weight before the first step, without using the harness."""
    if not analysis.steps:
        raise Vacuous("no step was seen")
    step = analysis.steps[0].ranks[0]
    name, largest = max(((n, float(value.abs().max())) for n, value in step.before.items()), key=lambda pair: pair[1])
    if largest < 1e-6:
        return passed("small-weights", "all weights are small")
    return failed("small-weights", f"a weight of {largest:.2g}", step=0, rank=0, parameter=name, cause="too-large")


@pytest.fixture
def judged(monkeypatch, simulation, cell_of):
    monkeypatch.setitem(CHECKS[TraceAnalysis], "small-weights", small_weights)
    cell = cell_of("mlp", "ddp", "1x2")
    trace = simulation.right_trace(WORKLOADS["mlp"], cell)

    def judged(change=lambda trace: trace):
        return cell, judge(TraceAnalysis(change(trace), WORKLOADS["mlp"], cell))

    return judged


def test_it_is_run_recorded_and_read_like_any_other(judged):
    cell, findings = judged()
    own = diagnosis(findings)
    assert (own.check, own.outcome, own.cause) == ("small-weights", Outcome.FAILED, "too-large")
    assert own.message.startswith("a weight of ")
    assert own.message.endswith(f"at step 0 on rank 0 in {own.parameter}")
    record = Result.of(cell, own, "", None)
    assert Result.model_validate_json(record.model_dump_json()).check == "small-weights"
    assert TypeAdapter(Checks).validate_python("small-weights") == ("small-weights",)


def test_one_that_could_not_have_failed_is_vacuous(judged):
    _, findings = judged(lambda trace: replace(trace, ranks=tuple(replace(rank, steps=()) for rank in trace.ranks)))
    (own,) = [one for one in findings if one.check == "small-weights"]
    assert own.outcome is Outcome.ERRORED
    assert own.message.startswith("vacuous (this check could not have failed): ")


def test_a_check_without_a_place_is_read_after_those_with_one():
    unknown, known = (Finding(check, Outcome.FAILED, "", cause="a-cause") for check in ("small-weights", "buffers"))
    assert in_reading_order([unknown, known]) == [known, unknown]


def test_a_rule_from_outside_connects_it(judged, monkeypatch):
    rule = Rule("small-weights", "initial-weights", "other weights have other sizes")
    kind = KINDS[TraceAnalysis]
    monkeypatch.setitem(KINDS, TraceAnalysis, replace(kind, rules=[*kind.rules, rule]))

    def moved(trace):
        first = replace(trace.ranks[0].steps[0])
        before = {name: value + 1 for name, value in first.before.items()}
        steps = (replace(first, before=before), *trace.ranks[0].steps[1:])
        return replace(trace, ranks=(replace(trace.ranks[0], steps=steps), *trace.ranks[1:]))

    _, findings = judged(moved)
    (own,) = [one for one in findings if one.check == "small-weights"]
    assert own.consequence_of == "initial-weights"
