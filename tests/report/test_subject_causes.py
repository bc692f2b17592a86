"""Over a subject's cells: one cause that explains most, the cells that it does not, and contradictions."""

from __future__ import annotations

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.for_programs import annotations_of, as_json
from plumbline.report.html.page import report_page
from plumbline.report.markdown import one_screen, support_page
from plumbline.report.tables.failures import mistakes, subject_causes
from plumbline.report.terminal import support_for_terminal
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import Run

NEVER = ("not-synchronised", "sync", "they were never all-reduced")


def cell(workload="mlp", gpus=2, precision="32", subject="my-ddp"):
    return Cell(subject, workload, "ddp", Topology(1, gpus), precision, "cpu")


def wrong(cause=NEVER, check="gradients", **fields):
    name, family, message = cause
    return Finding(check, Outcome.FAILED, message, name, family, **fields)


@pytest.fixture
def run_of(realistic_run, tmp_path):
    def build(findings):
        header = Header.of(findings, command=["pytest"], options={}, fingerprint=realistic_run.header.fingerprint,
                           simulated=True)  # fmt: skip
        results = tuple(Result.of(one, found, "pytest -k it", 0.1) for one, some in findings.items() for found in some)
        return Run(header, results, Footer.of(results, 1), tmp_path)

    return build


def test_one_cause_of_all_cells_is_said_once(run_of):
    (summary,) = subject_causes(run_of({cell(gpus=gpus): [wrong()] for gpus in (2, 3, 4)}))
    assert summary.cause == ("not-synchronised", "sync")
    assert not summary.others
    assert summary.sentences[0].startswith(
        "my-ddp: all 3 failing cells have the same cause, not-synchronised (sync): they"
    )


def test_the_last_words_of_what_is_told_are_shown(run_of):
    told = ("not-synchronised", "sync", f"they were {'never, never ' * 20}all-reduced; it happens in a short window")
    run = run_of({cell(gpus=gpus): [wrong(told)] for gpus in (2, 3)})
    assert "all-reduced; it happens in a short window." in " ".join(support_for_terminal(run, width=80).split())


def test_what_it_does_not_explain_is_listed(run_of):
    cells = {cell(gpus=gpus): [wrong()] for gpus in (2, 3)}
    other = cell("validation")
    (summary,) = subject_causes(run_of({**cells, other: [wrong(("never-evaluated", "metrics", ""), "validation")]}))
    assert summary.others == (other.id,)
    assert not summary.contradicting
    assert f"1 cell has another cause, never-evaluated: {other.id}." in summary.sentences


def test_a_cell_where_it_would_have_to_show_contradicts_it(run_of):
    cells = {cell(gpus=gpus): [wrong()] for gpus in (2, 3)}
    other = cell(gpus=4)
    (summary,) = subject_causes(run_of({**cells, other: [wrong(("another-loss", "loss-normalisation", ""))]}))
    assert summary.contradicting == ((other.id, "another-loss"),)
    assert "one of the two may be wrong" in summary.sentences[-1]


def test_unexplained_cells_are_no_cause(run_of):
    (summary,) = subject_causes(run_of({cell(gpus=n): [wrong(("unexplained", None, ""))] for n in (2, 3)}))
    assert summary.cause is None
    assert summary.sentences == ("my-ddp: no single cause explains most of its 2 failing cells.",)


def test_a_consequence_is_no_cause_of_its_cell(run_of):
    both = [wrong(), wrong(("parted", "sync", ""), "ranks-agree", consequence_of="gradients")]
    (summary,) = subject_causes(run_of({cell(gpus=gpus): both for gpus in (2, 3)}))
    assert summary.cause == ("not-synchronised", "sync")


def test_one_wrong_cell_needs_no_summary(run_of):
    assert not subject_causes(run_of({cell(): [wrong()]}))


def test_a_cell_with_two_mistakes_counts_for_both(run_of):
    averaged = wrong(("buffers-not-broadcast", "buffers", "buffers differ"), "buffers")
    unknown = wrong(("unexplained", None, "weights differ"), "update")
    run = run_of({cell(gpus=2): [wrong(), averaged, unknown], cell(gpus=3): [wrong()], cell(gpus=4): [unknown]})
    found = {group.title: [one.gpus for one in group.findings] for group in mistakes(run)["my-ddp"]}
    assert found == {"not-synchronised": [2, 3], "buffers-not-broadcast": [2], "failed: update": [4]}
    headline = "3 mistakes in my-ddp: not synchronised, buffers not broadcast, the update is wrong, cause unknown."
    assert headline in report_page(run)
    assert headline in one_screen(run)
    assert "3 mistakes in my-ddp:\n- not-synchronised (sync), in 2 cells:" in support_for_terminal(run, 160)
    assert [one.rule for one in annotations_of(run)] == list(found)


def test_cells_without_a_verdict_are_no_mistakes(run_of):
    raised = Finding("launch", Outcome.ERRORED, "it raised")
    assert "<h1>2 of 2 cells ended without a verdict.</h1>" in report_page(
        run_of({cell(gpus=n): [raised] for n in (2, 3)})
    )


def test_every_page_has_it_and_shows_consequences_after_their_root(run_of):
    later = wrong(("unexplained", None, "rank 1 holds other weights"), "ranks-agree", consequence_of="gradients")
    run = run_of({cell(gpus=gpus): [later, wrong()] for gpus in (2, 3)})
    pages = [
        support_for_terminal(run, 160), support_page(run), report_page(run), as_json(run),
    ]  # fmt: skip
    for page in pages:
        assert "never all-reduced" in page
    for page in pages[1:3]:
        assert "consequence of gradients: ranks-agree: rank 1 holds other weights" in page.replace("\\", "")
        assert page.index("never all-reduced") < page.index("consequence of gradients")
