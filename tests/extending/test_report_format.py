"""A new report format needs one module with a ``FORMAT``, and one line in ``FORMATS``."""

from __future__ import annotations

import sys

import pytest

from plumbline.cli.main import main
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.formats import FORMATS, ReportFormat, write_report
from plumbline.report.tables.cells import cell_table
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run_writer import RunWriter


def as_tap(run):
    """Return the run's cells in the Test Anything Protocol."""
    cells = cell_table(run)
    ends = [
        f"{'ok' if row.outcome == 'passed' else 'not ok'} {row.Index + 1} - {row.cell}" for row in cells.itertuples()
    ]
    return "\n".join([f"1..{len(ends)}", *ends]) + "\n"


@pytest.fixture
def recorded(cell_of, tmp_path):
    """A run on disk with a passed and a failed cell."""
    cells = {cell_of("mlp", "none", "1x1"): Outcome.PASSED, cell_of("mlp", "ddp", "1x2"): Outcome.FAILED}
    header = Header.of(list(cells), command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    results = [Result.of(cell, Finding("gradients", ended, "…"), "pytest", 0.5) for cell, ended in cells.items()]
    with RunWriter(tmp_path, header) as writer:
        writer.write(*results)
        writer.close(Footer.of(results, 1))
    return writer.path


def test_it_is_written_beside_the_others(recorded, monkeypatch):
    monkeypatch.setattr(
        sys.modules[__name__], "FORMAT", ReportFormat("TAP", as_tap, {"report.tap": as_tap}), raising=False
    )
    monkeypatch.setitem(FORMATS, "tap", f"{__name__}:FORMAT")
    write_report(recorded)
    assert (recorded / "report.md").exists()
    expected = "1..2\nok 1 - simulated-mlp-none-1x1-32\nnot ok 2 - simulated-mlp-ddp-1x2-32\n"
    assert (recorded / "report.tap").read_text() == expected


def test_the_command_shows_it(recorded, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[__name__], "FORMAT", ReportFormat("TAP", as_tap), raising=False)
    monkeypatch.setitem(FORMATS, "tap", f"{__name__}:FORMAT")
    assert main(["report", str(recorded), "--format", "tap"]) == 0
    assert capsys.readouterr().out.startswith("1..2\nok 1 - ")
