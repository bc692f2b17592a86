from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.report.html.page import report_page
from plumbline.report.markdown import support_page
from plumbline.report.tables.support import ROW_COLUMNS, side_by_side
from plumbline.report.terminal import support_for_terminal
from plumbline.results.run import Run

BuildRun = Callable[..., Run]
TRAINERS = ("reference", "train-loop", "torch", "lightning", "fabric", "accelerate", "transformers", "ignite", "mine")

cells = st.builds(
    lambda subject, workload, ddp, nodes, precision: Cell(
        subject, workload, "ddp" if ddp else "none", Topology(nodes, 4) if ddp else Topology(1, 1), precision, "cpu"
    ),
    st.sampled_from(TRAINERS),
    st.sampled_from(["mlp", "adam", "uneven"]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from(["32", "16", "bf16"]),
)
ends = st.sampled_from([Outcome.PASSED, Outcome.FAILED, Outcome.DEVIATES, Outcome.UNSUPPORTED])


def everybody(build_run: BuildRun) -> Run:
    return build_run(
        {
            Cell(subject, workload, "ddp", Topology(nodes, 4), precision, "cpu"): [
                Outcome.FAILED if subject == "torch" and precision == "16" else Outcome.PASSED
            ]
            for subject in TRAINERS
            for workload in map("w{}".format, range(30))
            for nodes in (1, 2)
            for precision in ("32", "16")
        }
    )


def test_one_subject_has_nobody_beside_it(build_run: BuildRun) -> None:
    assert side_by_side(build_run({Cell("mine", "mlp", "ddp", Topology(1, 2), "32", "cpu"): [Outcome.PASSED]})) is None


@given(st.dictionaries(cells, ends, min_size=1))
def test_every_cell_tried_is_counted_once_in_its_subjects_column(
    build_run: BuildRun, told: dict[Cell, Outcome]
) -> None:
    table = side_by_side(build_run({cell: [end] for cell, end in told.items()}))
    subjects = {cell.subject for cell in told}
    assert (table is None) == (len(subjects) == 1)
    if table is None:
        return
    assert len(table) == len(table[list(ROW_COLUMNS)].drop_duplicates())
    for subject in subjects:
        shares = [re.search(r"(\d+)/(\d+)", square) for square in table[subject]]
        counted = [sum(int(share[place]) for share in shares if share) for place in (1, 2)]
        own = [end for cell, end in told.items() if cell.subject == subject]
        right = own.count(Outcome.PASSED) + own.count(Outcome.DEVIATES)
        assert counted == [right, len(own) - own.count(Outcome.UNSUPPORTED)]


def test_what_nobody_declares_is_no_row(build_run: BuildRun) -> None:
    ends = {
        Cell(subject, "mlp", backend, Topology(1, 2), precision, "cpu"): [
            Outcome.PASSED if (subject, backend, precision) == ("a", "ddp", "32") else Outcome.UNSUPPORTED
        ]
        for subject in ("a", "b")
        for backend in ("dp", "ddp")
        for precision in ("32", "16")
    }
    run = build_run(ends)
    table = side_by_side(run)
    assert table is not None
    assert table[["Backend", "Precision", "a", "b"]].to_numpy().tolist() == [["ddp", "32", "Y 1/1", "-"]]
    every = side_by_side(run, every=True)
    assert every is not None
    assert len(every) == 4
    assert "7 cells skipped: their subjects do not claim to support them (a 3, b 4)." in support_for_terminal(run)


def test_nine_trainers_fit_a_terminal(build_run: BuildRun) -> None:
    shown = support_for_terminal(everybody(build_run), 100)
    assert max(map(cell_len, shown.splitlines())) <= 100
    assert shown.count("N 0/30") == 2
    assert shown.count("Y 30/30") == 4 * len(TRAINERS) - 2


@pytest.mark.parametrize("kind", [report_page, lambda run: support_page(run)])
def test_the_pages_have_it_too(build_run: BuildRun, kind: Callable[[Run], str]) -> None:
    page = kind(everybody(build_run))
    assert page.count("30/30") >= 4 * len(TRAINERS) - 2
    for name in TRAINERS:
        assert name in page
