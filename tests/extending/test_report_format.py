"""A report format costs one function of a run, and a line where reports are written."""

from __future__ import annotations

import pytest

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.machine.fingerprint import Fingerprint
from harness.report import write
from harness.report.tables.cells import cell_table
from harness.results.atomic import write_text
from harness.results.records import Footer, Header, Result
from harness.results.run import RunWriter, read_run


def as_tap(run):
    """Return the run's cells in the Test Anything Protocol."""
    cells = cell_table(run)
    ends = [
        f"{'ok' if row.outcome == 'passed' else 'not ok'} {row.Index + 1} - {row.cell}" for row in cells.itertuples()
    ]
    return "\n".join([f"1..{len(ends)}", *ends]) + "\n"


@pytest.fixture
def recorded(cell_of, tmp_path):
    """A run on disk of which one cell passed and one failed."""
    cells = {cell_of("mlp", "none", "1x1"): Outcome.PASSED, cell_of("mlp", "ddp", "1x2"): Outcome.FAILED}
    header = Header.of(list(cells), command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    results = [Result.of(cell, Finding("gradients", ended, "…"), "pytest", 0.5) for cell, ended in cells.items()]
    with RunWriter(tmp_path, header) as writer:
        writer.write(*results)
        writer.close(Footer.of(results, 1))
    return writer.path


def test_it_stands_beside_the_others(recorded, monkeypatch):
    others = write.write_report

    def with_tap(path):
        table = others(path)
        write_text(path / "report.tap", as_tap(read_run(path)))
        return table

    monkeypatch.setattr(write, "write_report", with_tap)
    write.write_report(recorded)
    assert (recorded / "report.md").exists()
    assert (
        recorded / "report.tap"
    ).read_text() == "1..2\nok 1 - simulated-mlp-none-1x1-32\nnot ok 2 - simulated-mlp-ddp-1x2-32\n"
