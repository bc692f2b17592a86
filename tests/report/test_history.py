"""The site about many runs: changes with their dates, and badges."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from plumbline.cli.main import main
from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.software import Software
from plumbline.core.topology import Topology
from plumbline.report.badge import BAD, GOOD
from plumbline.report.formats import write_report
from plumbline.report.history.histories import all_steps, cell_histories, counts, figure_histories
from plumbline.report.history.site import badge_of
from plumbline.results.files import RunNotFound
from plumbline.results.header_footer import Footer, Header, SubjectCode
from plumbline.results.records import Expected, Measurement, Result
from plumbline.results.run import Run
from plumbline.results.run_writer import RunWriter

RIGHT, WRONG = (
    Cell("mine", "mlp", "ddp", Topology(1, 2), "32", "cpu"),
    Cell("mine", "mlp", "dp", Topology(1, 2), "32", "cpu"),
)
CODE = SubjectCode(sha256=32 * "0a", commit=20 * "0c")
FIRST_DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)
Write = Callable[..., Path]


@pytest.fixture
def write(measured: Callable[..., Measurement], tmp_path: Path) -> Write:
    """Writes a day's run: a cell that is right, one that may have failed, and a speed."""

    def write(
        day: int, *, fails: bool, speed: float = 1000.0, version: str = "1.0", code: SubjectCode = CODE, **machine: Any
    ) -> Path:
        header = Header.of(
            [RIGHT, WRONG],
            command=["pytest"],
            options={},
            fingerprint=_machine().model_copy(update=machine),
            simulated=True,
            subjects={"mine": Software("mine", version, "2.13", "3.11")},
            code={"mine": code},
            started=FIRST_DAY + timedelta(days=day),
        )
        bad = Finding("gradients", Outcome.FAILED, "<b>the sum</b>", "sum-instead-of-mean", "averaging", 3e6)
        good = Finding("gradients", Outcome.PASSED, "as one device")
        results = [
            Result.of(RIGHT, good, "pytest -k right", 0.1),
            Result.of(WRONG, bad if fails else good, "pytest -k wrong", 0.1),
        ]
        samples = tuple(speed * (1 + (index - 1) / 200 + (day % 3 - 1) / 300) for index in range(3))
        figure = measured(RIGHT, "throughput", speed, samples=samples)
        with RunWriter(tmp_path / "reports", header) as writer:
            writer.write(figure, *results)
            writer.close(Footer.of(results, int(fails)))
        return writer.path

    return write


def _machine():
    from plumbline.machine.fingerprint import ComparabilityKey, Fingerprint

    return Fingerprint(key=ComparabilityKey(accelerator="cpu", device="A CPU", cpu_cores=2), commit="0123456789abcdef")


@pytest.fixture
def reports(write: Write, tmp_path: Path) -> Path:
    """Nine days: on the fourth, a new version fails; on the sixth, it becomes slower; on the seventh, it is fixed."""
    for day in range(9):
        write(day, fails=3 <= day < 6, speed=1000.0 if day < 5 else 800.0, version="1.0" if day < 3 else "1.1")
    return tmp_path / "reports"


def test_the_page_says_what_changed_and_what_else_did(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(reports)]) == 0
    site = reports / "history"
    assert capsys.readouterr().out.strip() == str(site / "index.html")
    page = (site / "index.html").read_text()
    assert "All 2 cells were right in their newest run; 1 figure became worse." in page
    assert "failed: sum-instead-of-mean → passed" in page
    assert "<h3>mine 1.0 → 1.1 " in page
    assert "&lt;b&gt;the sum&lt;/b&gt;" in page
    assert re.search(r"−(19|20)\.\d\s%", page)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, {"code": SubjectCode(sha256=32 * "1b", commit=CODE.commit)}, ["source 0a0a0a0a0a → 1b1b1b1b1b"]),
        ({}, {"code": SubjectCode(commit=20 * "1c")}, ["commit 0c0c0c0c0c → 1c1c1c1c1c", "source 0a0a0a0a0a → none"]),
        ({"code": SubjectCode()}, {"code": SubjectCode(commit=f"{CODE.commit}-dirty")}, ["none → 0c0c0c0c0c-dirty"]),
        ({}, {"commit": 20 * "2d"}, ["plumbline&#39;s commit 0123456789 → 2d2d2d2d2d"]),
        ({"packages": {"numpy": "1.0"}}, {"packages": {"numpy": "2.0"}}, ["numpy 1.0 → 2.0"]),
        ({}, {"environment": {"OMP_NUM_THREADS": "4"}}, ["OMP_NUM_THREADS none → 4"]),
    ],
)
def test_whatever_is_recorded_and_differs_is_named(
    before: dict[str, Any], after: dict[str, Any], named: list[str], write: Write, tmp_path: Path
) -> None:
    write(0, fails=False, **before)
    write(1, fails=True, **after)
    assert main(["history", str(tmp_path / "reports")]) == 0
    page = (tmp_path / "reports" / "history" / "index.html").read_text()
    assert "Nothing that is recorded differs" not in page
    assert [text for text in named if text not in page] == []


def test_the_commit_of_plumbline_is_not_shown_as_the_subject_s(write: Write, tmp_path: Path) -> None:
    write(0, fails=False)
    write(1, fails=True)
    main(["history", str(tmp_path / "reports")])
    page = (tmp_path / "reports" / "history" / "index.html").read_text()
    assert "Nothing that is recorded differs" in page
    runs = page[page.index('<section id="runs">') :]
    assert "<code>commit 0c0c0c0c0c</code>" in runs, "that of the subject"
    assert '<th scope="col">plumbline</th>' in runs
    assert "<code>0123456789</code>" in runs


def test_every_address_is_relative_and_leads_somewhere(reports: Path) -> None:
    write_report(
        next(path for path in reports.iterdir() if (path / "results.jsonl").is_file() and not path.is_symlink())
    )
    main(["history", str(reports)])
    page = (reports / "history" / "index.html").read_text()
    addresses = set(re.findall(r'(?:href|src)="([^"]*)"', page))
    assert any(address.endswith("/report.html") for address in addresses)
    for address in addresses:
        if address.startswith("data:"):
            continue
        file, _, anchor = address.partition("#")
        assert not re.match(r"[a-z]+:|/", file), address
        assert not file or (reports / "history" / file).is_file(), address
        assert not anchor or f'id="{anchor}"' in page, address


def test_a_site_elsewhere_has_no_addresses_that_lead_out_of_it(reports: Path, tmp_path: Path) -> None:
    main(["history", str(reports), "-o", str(tmp_path / "site")])
    assert 'href="../' not in (tmp_path / "site" / "index.html").read_text()


def test_a_badge_says_how_the_newest_run_ended(write: Write, tmp_path: Path) -> None:
    write(0, fails=True)
    main(["history", str(tmp_path / "reports")])
    badge = (tmp_path / "reports" / "history" / "badges" / "mine.svg").read_text()
    assert "plumbline: 1 of 2 cells wrong" in badge
    assert BAD in badge
    ElementTree.fromstring(badge)
    write(1, fails=False)
    main(["history", str(tmp_path / "reports")])
    assert GOOD in (tmp_path / "reports" / "history" / "badges" / "mine.svg").read_text()


def test_a_cell_that_a_run_did_not_have_has_not_changed(build_run: Callable[..., Run], cells: list[Cell]) -> None:
    one, other = cells[:2]
    runs = [
        build_run({one: [Outcome.PASSED]}),
        build_run({other: [Outcome.FAILED]}),
        build_run({one: [Outcome.PASSED]}),
    ]
    histories = cell_histories(runs)
    assert [len(history.spans) for history in histories] == [1, 1]
    assert len(histories[0].now.runs) == 2
    assert all_steps(histories, []) == []
    assert "1 of 1 cell wrong" in badge_of(histories[1:])


def test_cells_that_did_the_same_in_a_step_are_told_once(build_run: Callable[..., Run], cells: list[Cell]) -> None:
    before, after = (build_run({cell: [end] for cell in cells[:3]}) for end in (Outcome.PASSED, Outcome.FAILED))
    after = dataclasses.replace(after, header=after.header.model_copy(update={"run_id": "later"}))
    (step,) = all_steps(cell_histories([before, after]), [])
    (change,) = step.changes
    assert [name for name, _ in change.places] == [cell.id for cell in cells[:3]]
    assert counts([step]) == {"worse": 3, "better": 0, "other": 0}


def test_a_failure_that_becomes_known_has_not_become_better(build_run: Callable[..., Run], cells: list[Cell]) -> None:
    summed = Finding("gradients", Outcome.FAILED, "the sum", "sum-instead-of-mean", "averaging", 3e6)
    results = [Result.of(cells[0], summed, "pytest", 0.1)]
    known = Expected(outcome=Outcome.FAILED, reason="it is known", entry="entry 1")
    results += [results[0].model_copy(update={"expected": known})]
    run = build_run({cells[0]: [Outcome.PASSED]})
    runs = [dataclasses.replace(run, results=(one,)) for one in results]
    histories = cell_histories(runs)
    (step,) = all_steps(histories, [])
    (change,) = step.changes
    assert (change.kind, change.sentence) == ("other", "sum-instead-of-mean as before, now expected")
    assert "known" in badge_of(histories)


def test_another_machine_is_another_series(build_measured_run: Callable[..., Run]) -> None:
    run = build_measured_run()
    fingerprint = run.header.fingerprint
    other = fingerprint.model_copy(update={"key": fingerprint.key.model_copy(update={"device": "another"})})
    figures = tuple(one.model_copy(update={"samples": (1.0, 2.0)}) for one in run.measurements[:1])
    both = [
        dataclasses.replace(run, header=run.header.model_copy(update={"fingerprint": machine}), measurements=figures)
        for machine in (fingerprint, other, fingerprint)
    ]
    assert [len(history.points) for history in figure_histories(both)] == [2, 1]


def test_what_cannot_be_read_is_left_out_and_named(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(0, fails=False)
    (tmp_path / "reports" / "broken").mkdir()
    (tmp_path / "reports" / "broken" / "results.jsonl").write_text("nonsense")
    assert main(["history", str(tmp_path / "reports")]) == 0
    assert "skipped: " in capsys.readouterr().err
    assert "Left out" in (tmp_path / "reports" / "history" / "index.html").read_text()


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(tmp_path)]) == 2
    assert "There is no readable run in" in capsys.readouterr().err
    assert RunNotFound is not None
