"""A run that stopped anywhere can be resumed, and loses nothing that was reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import Fingerprint
from plumbline.results.files import NothingToResume
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import RESULTS, line_of, read_run
from plumbline.results.run_writer import RunWriter

CELLS = [Cell("reference", "mlp", "ddp", Topology(1, gpus), "32", "cpu") for gpus in (2, 3, 4)]
HEADER = Header.of(CELLS, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
FINDINGS = (Finding("gradients", Outcome.PASSED, "fine"), Finding("update", Outcome.FAILED, "é " * 50))


def results_of(cell: Cell) -> list[Result]:
    return [Result.of(cell, finding, "pytest", 0.1, None, len(FINDINGS)) for finding in FINDINGS]


EVERY = [result for cell in CELLS for result in results_of(cell)]


def run_broken_off_at(folder: Path, end: int) -> Path:
    path = folder / HEADER.run_id
    path.mkdir(exist_ok=True)
    whole = b"".join(map(line_of, [HEADER, *EVERY, Footer.of(EVERY, 1)]))
    (path / RESULTS).write_bytes(whole[: len(line_of(HEADER)) + end])
    return path


LENGTH = sum(len(line_of(result)) for result in EVERY)


@given(st.integers(0, LENGTH - 1))
def test_a_run_that_broke_off_anywhere_keeps_its_whole_cells_and_is_completed(
    tmp_path_factory: pytest.TempPathFactory, end: int
) -> None:
    path = run_broken_off_at(tmp_path_factory.getbasetemp(), end)
    reported = [
        cell
        for number, cell in enumerate(CELLS, 1)
        if end >= sum(len(line_of(result)) for result in EVERY[: len(FINDINGS) * number]) - 1
    ]
    writer, run = RunWriter.resume(path)
    with writer:
        assert set(run.whole) >= {results_of(cell)[0].coordinates for cell in reported[:-1]}
        assert all(len(found) == len(FINDINGS) for found in run.whole.values())
        assert [result for found in run.whole.values() for result in found] == list(run.results)
        missing = [cell for cell in CELLS if results_of(cell)[0].coordinates not in run.whole]
        for cell in missing:
            writer.write(*results_of(cell))
        writer.close(Footer.of(EVERY, 1))
    completed = read_run(path)
    assert list(completed.results) == EVERY
    assert not completed.incomplete


def test_a_run_that_was_stopped_after_some_cells_goes_on_though_it_has_a_footer(tmp_path: Path) -> None:
    path = run_broken_off_at(tmp_path, 0)
    first = results_of(CELLS[0])
    (path / RESULTS).write_bytes(b"".join(map(line_of, [HEADER, *first, Footer.of(first, 1)])))
    writer, run = RunWriter.resume(path)
    with writer:
        assert run.footer is None
        assert list(run.results) == first


def test_a_complete_run_is_not_resumed(tmp_path: Path) -> None:
    path = run_broken_off_at(tmp_path, LENGTH + 10_000)
    before = (path / RESULTS).read_bytes()
    with pytest.raises(NothingToResume, match="is already complete"):
        RunWriter.resume(path)
    assert (path / RESULTS).read_bytes() == before


def test_a_run_that_somebody_writes_is_not_gone_on_with(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as writer, pytest.raises(NothingToResume, match="another process"):
        RunWriter.resume(writer.path)
