from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.core.training_behavior import TrainingBehavior
from plumbline.machine.fingerprint import Fingerprint
from plumbline.results.header_footer import Footer, Header, new_run_id
from plumbline.results.records import Expected, PlannedCell, Result
from plumbline.results.run import line_of, record_of

CELL = Cell("reference", "mlp", "ddp", Topology(2, 4), "32", "cpu")

# Every code point, including lone surrogates, which undecodable bytes in a rank's stderr become.
any_text = st.text(st.characters(exclude_categories=()))
counts = st.none() | st.integers(0, 2**53)
findings = st.builds(
    Finding,
    check=any_text,
    outcome=st.sampled_from(Outcome),
    message=any_text,
    cause=st.none() | any_text,
    family=st.none() | any_text,
    error_x_noise=st.none() | st.floats(),
    step=counts,
    parameter=st.none() | any_text,
    rank=counts,
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


expectations = st.builds(
    Expected, outcome=st.sampled_from(Outcome), reason=any_text, link=st.none() | any_text, entry=any_text
)


@given(findings, any_text, st.none() | st.floats(0, 1e9), st.none() | expectations)
def test_a_result_comes_back_as_it_was_written(
    finding: Finding, reproduce: str, seconds: float | None, expected: Expected | None
) -> None:
    result = Result.of(CELL, finding, reproduce, seconds, expected)
    line = line_of(result)
    assert record_of(line) == result
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    json.loads(line, parse_constant=refuse_constant)


def test_what_a_subject_declares_is_written_down_with_its_cells():
    other = replace(CELL, subject="mine")
    declared = TrainingBehavior(buffers="per-rank", max_nodes=2)
    header = Header.of(
        [CELL, other], command=[], options={}, fingerprint=Fingerprint(), simulated=True, behaviors={other: declared}
    )
    ordinary, planned = record_of(line_of(header)).planned
    assert (TrainingBehavior.of(ordinary.conduct), TrainingBehavior.of(planned.conduct)) == (
        TrainingBehavior(),
        declared,
    )


def test_a_cell_of_an_older_run_is_ordinary():
    values = PlannedCell.of(CELL).model_dump()
    del values["conduct"]
    assert TrainingBehavior.of(PlannedCell.model_validate(values).conduct) == TrainingBehavior()


@given(findings)
def test_a_result_says_what_the_finding_said(finding: Finding) -> None:
    result = Result.of(CELL, finding, "pytest", None)
    assert (result.outcome, result.step, result.rank) == (finding.outcome, finding.step, finding.rank)
    assert (result.cause is None) == (finding.cause is None)
    if finding.error_x_noise is None or not math.isnan(finding.error_x_noise):
        assert result.error_x_noise == finding.error_x_noise


def test_an_infinite_error_is_a_word_and_not_a_number_is_infinite() -> None:
    for error in (math.inf, math.nan):
        line = line_of(Result.of(CELL, Finding("c", Outcome.FAILED, "", error_x_noise=error), "", None))
        assert json.loads(line)["error_x_noise"] == "inf"
        back = record_of(line)
        assert isinstance(back, Result)
        assert back.error_x_noise == math.inf


def test_a_missing_number_is_null() -> None:
    written = json.loads(line_of(Result.of(CELL, Finding("c", Outcome.PASSED, ""), "", None)))
    missing = ("error_x_noise", "step", "rank", "parameter", "cause", "family", "seconds", "expected")
    assert [written[name] for name in missing] == [None] * len(missing)


def test_a_result_has_the_fields_that_others_build_on() -> None:
    written = json.loads(line_of(Result.of(CELL, Finding("c", Outcome.PASSED, ""), "pytest", 1.0)))
    fixed = "type subject workload backend num_nodes gpus precision accelerator check outcome cause family "
    fixed += "error_x_noise step parameter rank message reproduce"
    assert set(fixed.split()) <= set(written)
    assert (written["type"], written["num_nodes"], written["gpus"]) == ("result", 2, 4)


def test_a_field_of_a_later_version_is_no_error() -> None:
    result = Result.of(CELL, Finding("c", Outcome.PASSED, ""), "pytest", 1.0)
    written = json.loads(line_of(result)) | {"peak_memory": [1, {"unit": "B"}]}
    assert record_of(json.dumps(written).encode()) == result


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    message = "begin" + "x" * 1_000_000 + "end"
    kept = Result.of(CELL, Finding("c", Outcome.CRASHED, message), "", None).message
    assert len(kept) < 20_000
    assert kept.startswith("begin")
    assert kept.endswith("end")


def test_a_header_does_not_publish_where_the_program_lies() -> None:
    header = Header.of(
        [CELL],
        command=["/home/ada/bin/pytest", "suites/"],
        options={},
        fingerprint=Fingerprint(),
        simulated=True,
    )
    assert header.command == ("pytest", "suites/")
    assert record_of(line_of(header)) == header


def test_a_run_id_cannot_lead_out_of_the_report_directory() -> None:
    header = Header.of([], command=[], options={}, fingerprint=Fingerprint(), simulated=True)
    for name in ("..", "../x", "a/b", "", ".hidden", "a\n"):
        with pytest.raises(ValueError, match="run_id"):
            Header.model_validate(header.model_dump() | {"run_id": name})


def test_an_option_that_json_cannot_hold_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="finite"):
        Header.of([], command=[], options={"x": [math.inf]}, fingerprint=Fingerprint(), simulated=True)


def test_run_ids_of_one_second_differ_and_sort_by_time() -> None:
    header = Header.of([], command=[], options={}, fingerprint=Fingerprint(), simulated=True)
    assert len({new_run_id(header.started) for _ in range(200)}) == 200
    assert new_run_id(header.started) < new_run_id(header.started.replace(year=header.started.year + 1))


def test_a_footer_counts_a_cell_by_its_worst_finding() -> None:
    other = Cell("reference", "mlp", "none", Topology(1, 1), "32", "cpu")
    ends = [(CELL, Outcome.PASSED), (CELL, Outcome.FAILED), (other, Outcome.PASSED)]
    results = [Result.of(cell, Finding("c", outcome, ""), "", None) for cell, outcome in ends]
    assert Footer.of(results, 1).cells == {Outcome.PASSED: 1, Outcome.FAILED: 1}


def test_a_result_from_before_there_were_consequences_can_be_read():
    cell = Cell("my-ddp", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    finding = Finding("training", Outcome.FAILED, "", consequence_of="gradients")
    stored = Result.of(cell, finding, "", None).model_dump(mode="json")
    assert stored.pop("consequence_of") == "gradients"
    assert Result.model_validate(stored).consequence_of is None
