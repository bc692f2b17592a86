"""A page's text about a root cause, and its pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import ErrorGrid, Finding, RankShares
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.html.page import report_page
from plumbline.report.html.pictures import heat_map, rank_paths
from plumbline.report.tables.failures import diagnoses, failures
from plumbline.report.text import place_and_size
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import Run, read_run
from plumbline.results.run_writer import RunWriter

HINT = "the all-reduce is not divided by the world size"
GRID = ErrorGrid(("layers.0.weight", "layers.0.bias"), (0, 1), ((4e6, math.inf), (0.8, None)))
SUMMED = Finding(
    "gradients",
    Outcome.FAILED,
    "gradients at step 0 on rank 1 are the sum (0.9 × noise from this prediction; 4e6 × noise from the right "
    f"gradient): {HINT}; it happens in every second step",
    "summed-over-ranks",
    "averaging",
    error_x_noise=4e6,
    step=0,
    parameter="layers.0.weight",
    rank=1,
    limit_x_noise=8.0,
    hint=HINT,
    cause_x_noise=0.9,
    error_grid=GRID,
    rank_shares=RankShares(0, (0.5, 0.5), ((0.5, 0.5), (1.0, 0.0))),
)
RIGHT = Finding(
    "gradients",
    Outcome.PASSED,
    "as one device",
    error_x_noise=0.8,
    limit_x_noise=8.0,
    error_grid=ErrorGrid(("layers.0.weight", "layers.0.bias"), (0, 1), ((0.8, 0.4), (0.2, 0.1))),
)


def cell(workload: str = "mlp", gpus: int = 2, subject: str = "mine") -> Cell:
    return Cell(subject, workload, "ddp", Topology(1, gpus), "32", "cpu")


@pytest.fixture
def run_of(tmp_path) -> Callable[[dict[Cell, Finding]], Run]:
    """Writes a run, and reads it back."""

    def run(findings: dict[Cell, Finding]) -> Run:
        header = Header.of(findings, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
        results = [Result.of(one, finding, f"pytest -k {one.id}", 0.1) for one, finding in findings.items()]
        with RunWriter(tmp_path, header) as writer:
            writer.write(*results)
            writer.close(Footer.of(results, 1))
        return read_run(writer.path)

    return run


def test_a_group_is_a_cause_of_one_subject(run_of):
    crash = Finding("launch", Outcome.CRASHED, "rank 1 ended with signal 9")
    run = run_of(
        {
            cell("mlp"): SUMMED,
            cell("cnn"): SUMMED,
            cell("mlp", subject="other"): SUMMED,
            cell("a"): crash,
            cell("b"): Finding("launch", Outcome.CRASHED, "rank 0 ended with signal 11"),
            cell("c"): Finding("launch", Outcome.CRASHED, "KeyError: 'loss'"),
        }
    )
    assert [(one.subject, one.title, len(one.findings)) for one in failures(run)] == [
        ("mine", "summed-over-ranks", 2),
        ("mine", "crashed: launch", 2),
        ("other", "summed-over-ranks", 1),
        ("mine", "crashed: launch", 1),
    ]


def test_a_diagnosis_says_what_where_how_large_how_sure_and_what_to_change(run_of):
    run = run_of({cell(): SUMMED, cell(gpus=4): SUMMED, cell(subject="right"): RIGHT, cell("cnn"): RIGHT})
    (one,) = diagnoses(run)
    assert one.title == "Summed over ranks"
    assert HINT not in one.observed
    assert one.observed.endswith("from the right gradient); it happens in every second step")
    assert one.where == ("step 0", "rank 1", "parameter layers.0.weight", "layer layers.0")
    assert one.size == "4.0e6 × noise; a correct trainer stays below 8.0"
    assert one.certainty == (
        "The error is 5.0e5 × the limit. The cause predicts the recorded numbers within 0.90 × noise."
    )
    assert one.advice == HINT
    assert one.extent == "2 cells: mlp · ddp · 1×2, 1×4 · 32"
    assert one.right is not None
    assert one.right.subject == "right"
    page = report_page(run)
    run_again = 'pytest <span class="option">-k</span> '
    for text in (HINT, "4.0e6\N{NO-BREAK SPACE}× noise", "Right: right", "✗ 1\N{NO-BREAK SPACE}× rank 0", run_again):
        assert text in page, text


def test_a_cause_without_a_name_gets_advice_of_its_outcome(run_of):
    run = run_of({cell(): Finding("launch", Outcome.TIMED_OUT, "rank 1 never came")})
    (one,) = diagnoses(run)
    assert "collective" in one.advice
    assert one.certainty == "The training did not end normally, so its numbers were not checked."
    assert one.right is None


def test_the_log_of_a_crash_is_shown_beside_its_cause_and_a_mistakes_is_not(run_of):
    crashed = run_of({cell(): Finding("launch", Outcome.CRASHED, "rank 1 died"), cell("other"): SUMMED})
    for one in (cell(), cell("other")):
        folder = crashed.path / "traces" / one.id
        folder.mkdir(parents=True)
        (folder / "rank-1.log").write_text(f"the end of {one.id} --at <b>boom</b>")
    causes = report_page(crashed).partition('id="support"')[0]
    shown = f'the end of {cell().id} <span class="option">--at</span> &lt;b&gt;boom&lt;/b&gt;'
    assert shown in causes
    assert f"the end of {cell('other').id}" not in causes


def test_a_check_that_could_not_have_failed_is_not_said_to_have_ended_early(run_of):
    (one,) = diagnoses(run_of({cell(): Finding("update", Outcome.ERRORED, "vacuous: no weight moved at any step")}))
    assert one.certainty.startswith("It has no verdict")
    assert "the check could not have failed" in one.certainty


def test_a_named_cause_is_never_called_unknown(run_of):
    (one,) = diagnoses(run_of({cell(): Finding("buffers", Outcome.FAILED, "it", "buffers-not-broadcast", "buffers")}))
    assert one.advice == ""


def test_an_error_without_a_limit_is_not_said_to_be_counted(run_of):
    finding = Finding("precision", Outcome.FAILED, "it", "trained-in-32-bits", "amp", error_x_noise=3e-5)
    (one,) = diagnoses(run_of({cell(): finding}))
    assert one.size == "3.0e-5 × noise"
    assert one.certainty == "The cause explains what this check recorded."


def test_a_buffer_is_not_called_a_parameter(run_of):
    finding = Finding("buffers", Outcome.FAILED, "it", step=1, rank=1, parameter="bn.running_mean")
    (one,) = diagnoses(run_of({cell(): finding}))
    assert one.where == ("step 1", "rank 1", "buffer bn.running_mean", "layer bn")


def test_a_size_may_be_that_of_all_parameters_together(run_of):
    finding = dataclasses.replace(SUMMED, parameters=(("layers.0.weight", 3e6),))
    (one,) = diagnoses(run_of({cell(): finding}))
    assert one.size == (
        "up to 4.0e6 × noise over all steps, in one parameter or in all of them together; a correct trainer stays "
        "below 8.0"
    )


def test_a_dotted_line_is_explained_only_where_there_is_one(run_of):
    summed = RankShares(0, (0.5, 0.5), ((1.0, 1.0), (1.0, 1.0)))
    assert "dotted line" in report_page(run_of({cell(): SUMMED}))
    assert "dotted line" not in report_page(run_of({cell(): dataclasses.replace(SUMMED, rank_shares=summed)}))


def test_a_cell_with_another_mistake_is_not_shown_as_right(run_of):
    other = cell(subject="other")
    run = run_of({cell(): SUMMED, other: RIGHT})
    assert diagnoses(run)[0].right is not None
    wrong = Result.of(other, Finding("samples", Outcome.FAILED, "drawn twice"), "pytest", 0.1)
    assert diagnoses(dataclasses.replace(run, results=(*run.results, wrong)))[0].right is None


def test_a_picture_is_as_wide_as_what_ranks_received():
    shares = RankShares(0, (0.037, 0.037), ((0.0237, 0.0299), (0.0237, 0.0299)))
    narrow, wide = rank_paths(SUMMED.rank_shares), rank_paths(shares)
    assert narrow is not None
    assert wide is not None
    assert narrow.width < wide.width


def test_a_picture_of_more_weights_than_ranks_is_drawn():
    assert rank_paths(RankShares(0, (), ((0.5, 0.5, 1.0),))) is not None


def test_a_heat_map_writes_its_values_and_where_the_error_begins(run_of):
    run = run_of({cell(): SUMMED})
    picture = heat_map(run.results[0], wrong=True)
    assert picture is not None
    assert [(square.text, square.degree) for square in picture.squares] == [
        ("4.0e6", 2),
        ("∞", 4),
        ("0.80", 0),
        ("", -1),
    ]
    assert "2 of 3 errors of 2 parameters over 2 steps are above the limit of 8.0 × noise" in picture.sentence
    assert "first at step 0 in layers.0.weight; the largest of these is ∞ × noise at step 1" in picture.sentence
    right = heat_map(run.results[0].model_copy(update={"limit_x_noise": math.inf}), wrong=False)
    assert right is not None
    assert right.sentence.startswith("None of 3 errors")


def test_paths_name_what_each_rank_received(run_of):
    run = run_of({cell(): SUMMED})
    picture = rank_paths(run.results[0].rank_shares)
    assert picture is not None
    assert [(text, wrong) for _, text, wrong in picture.received] == [
        ("0.5 × rank 0 + 0.5 × rank 1", False),
        ("1 × rank 0", True),
    ]
    assert "Right is 0.5 × rank 0 + 0.5 × rank 1; rank 1 received 1 × rank 0." in picture.sentence
    assert [link.width for link in picture.links] == [3.5, 3.5, 7.0, 0.0]


def test_a_run_recorded_without_pictures_is_a_page(build_run):
    page = report_page(build_run({cell(): [Outcome.FAILED]}))
    assert "<figure" not in page
    assert "Check0 failed, cause unknown" in page


def test_a_size_is_that_of_the_place_and_the_largest_has_its_own_place():
    finding = dataclasses.replace(SUMMED, parameters=(("layers.0.weight", 3e6), ("layers.0.bias", 1e6)))
    elsewhere = dataclasses.replace(finding, error_grid=ErrorGrid(("layers.0.bias",), (0, 3), ((1e6, 4e6),)))
    here = "step 0, rank 1, parameter layers.0.weight, 3.0e6 × noise"
    assert place_and_size(elsewhere) == f"{here}; largest 4.0e6 × noise at step 3 in layers.0.bias"
    assert place_and_size(dataclasses.replace(finding, error_grid=None)).endswith("over all steps and parameters")
    assert place_and_size(dataclasses.replace(elsewhere, error_x_noise=3e6)) == here
    assert place_and_size(SUMMED) == here.replace("3.0", "4.0")
