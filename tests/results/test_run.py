from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.errors import PlumblineError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import Fingerprint
from plumbline.results.files import (
    CorruptRecord,
    MissingHeader,
    NewerSchema,
    ReportDirUnusable,
    ResultsError,
    RunNotFound,
)
from plumbline.results.header_footer import SCHEMA_VERSION, Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import RESULTS, Run, line_of, read_run
from plumbline.results.run_writer import RunWriter, check_report_dir

CELLS = [Cell("reference", "mlp", backend, Topology(1, 2), "32", "cpu") for backend in ("dp", "ddp")]


def new_header() -> Header:
    return Header.of(CELLS, command=["pytest"], options={"gpus": 2}, fingerprint=Fingerprint(), simulated=True)


def some_results() -> list[Result]:
    finding = Finding("gradients", Outcome.PASSED, "naïve × “quoted”\n", error_x_noise=0.5)
    return [Result.of(cell, finding, "pytest -k it", 0.25) for cell in CELLS]


def whole_file() -> bytes:
    results = some_results()
    return b"".join(map(line_of, [new_header(), *results, Footer.of(results, 0)]))


def read_bytes(folder: Path, content: bytes) -> Run:
    (folder / RESULTS).write_bytes(content)
    return read_run(folder)


def write_run(report_dir: Path, header: Header, results: Iterable[Result]) -> Path:
    kept = list(results)
    with RunWriter(report_dir, header) as writer:
        writer.write(*kept)
        writer.close(Footer.of(kept, 0))
    return writer.path


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    header = new_header()
    path = write_run(tmp_path, header, some_results())
    run = read_run(path)
    assert (run.header, list(run.results), run.path) == (header, some_results(), path)
    assert not run.incomplete
    assert read_run(path / RESULTS) == run
    assert read_run(tmp_path / "latest") == run


def test_a_record_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with RunWriter(tmp_path, new_header()) as writer:
        for count, result in enumerate(some_results(), start=1):
            writer.write(result)
            run = read_run(tmp_path / "latest")
            assert len(run.results) == count
            assert run.footer is None
            assert run.incomplete


def test_a_run_that_breaks_off_has_no_footer(tmp_path: Path) -> None:
    with RunWriter(tmp_path, new_header()) as writer:
        writer.write(*some_results())
    run = read_run(writer.path)
    assert run.footer is None
    assert run.cut_short == some_results()[-1].coordinates


def test_a_file_cut_off_anywhere_gives_only_what_was_written_or_our_error(tmp_path: Path) -> None:
    content = whole_file()
    whole = read_bytes(tmp_path, content)
    header_end = content.index(b"\n")
    for end in range(len(content)):
        if end < header_end:
            with pytest.raises(MissingHeader):
                read_bytes(tmp_path, content[:end])
            continue
        run = read_bytes(tmp_path, content[:end])
        assert run.header == whole.header
        assert run.results == whole.results[: len(run.results)]
        assert len(run.results) >= content[:end].count(b"\n") - 1 - (run.footer is not None)
        assert run.footer in (None, whole.footer)
        assert run.incomplete == (run.footer is None)


@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(0, 200))
@example(b'{"type":"result"}\n', 0, 0)
@example(b"[" * 200, 10_000, 0)
@example(b'{"type":"header","schema_version":1}\n', 10_000, 0)
def test_a_damaged_file_is_never_more_than_our_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int, lost: int
) -> None:
    content = whole_file()
    place = min(place, len(content))
    folder = tmp_path_factory.getbasetemp()
    with contextlib.suppress(PlumblineError):
        read_bytes(folder, content[:place] + noise + content[place + lost :])


def test_damage_inside_a_file_names_the_line(tmp_path: Path) -> None:
    lines = whole_file().splitlines(keepends=True)
    for damage in (b"{}\n", b"garbage\n", lines[1].replace(b'"gpus":2', b'"gpus":"two"'), lines[0]):
        with pytest.raises(CorruptRecord, match=r"results\.jsonl, line 2: "):
            read_bytes(tmp_path, b"".join([lines[0], damage, *lines[2:]]))


def test_nothing_may_stand_after_the_footer(tmp_path: Path) -> None:
    with pytest.raises(CorruptRecord, match="line 5"):
        read_bytes(tmp_path, whole_file() + line_of(some_results()[0]))


def test_a_newer_schema_is_refused_whatever_else_it_says(tmp_path: Path) -> None:
    header = json.dumps({"type": "header", "schema_version": SCHEMA_VERSION + 1, "planned": "otherwise"})
    with pytest.raises(NewerSchema, match="upgrade plumbline"):
        read_bytes(tmp_path, header.encode() + b"\n")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 50, b"[]\n", line_of(some_results()[0])])
def test_what_does_not_begin_with_a_header_is_no_run(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(MissingHeader):
        read_bytes(tmp_path, content)


@pytest.mark.parametrize("content", [b"", b"no header\n"])
def test_only_the_folder_of_a_run_is_named_for_deletion(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(MissingHeader, match="Delete its folder"):
        read_bytes(tmp_path, content)
    (tmp_path / "afile").write_bytes(content)
    with pytest.raises(MissingHeader, match=r"afile is not a run: name a folder that holds a results\.jsonl\.$"):
        read_run(tmp_path / "afile")


def test_no_run_is_said_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "pipe"):
        with pytest.raises(RunNotFound, match="There is no run at"):
            read_run(path)


def test_a_file_larger_than_any_run_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plumbline.results.run.LARGEST_FILE", 100)
    with pytest.raises(ResultsError, match="larger"):
        read_bytes(tmp_path, whole_file())


def test_planned_cells_without_a_result_are_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, new_header(), some_results()[:1]))
    assert [cell.backend for cell in run.missing] == ["ddp"]
    assert run.incomplete


def test_latest_follows_the_last_run_begun(tmp_path: Path) -> None:
    for _ in range(3):
        path = write_run(tmp_path, new_header(), [])
        assert os.readlink(tmp_path / "latest") == path.name
    assert not list(tmp_path.glob(".*"))


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    headers = [new_header() for _ in range(8)]
    start = threading.Barrier(len(headers))

    def one(header: Header) -> None:
        start.wait()
        write_run(tmp_path, header, some_results())

    threads = [threading.Thread(target=one, args=(header,)) for header in headers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for header in headers:
        assert read_run(tmp_path / header.run_id).header == header
    assert read_run(tmp_path / "latest").header in headers
    assert len(list(tmp_path.iterdir())) == len(headers) + 1


def test_a_run_never_writes_over_another(tmp_path: Path) -> None:
    header = new_header()
    path = write_run(tmp_path, header, some_results())
    before = (path / RESULTS).read_bytes()
    with pytest.raises(ReportDirUnusable):
        RunWriter(tmp_path, header)
    assert (path / RESULTS).read_bytes() == before


def test_an_unusable_report_directory_is_answered_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "latest").mkdir(parents=True)
    for report_dir in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "taken"):
        with pytest.raises(ReportDirUnusable, match="--report-dir"):
            RunWriter(report_dir, new_header())


def test_a_look_at_a_report_directory_makes_nothing_and_a_run_makes_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportDirUnusable, match="file is not a directory"):
        check_report_dir(tmp_path / "file" / "below")
    report_dir = tmp_path / "there" / "is" / "none"
    check_report_dir(report_dir)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    RunWriter(report_dir, new_header())
    assert (report_dir / "latest" / RESULTS).is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_report_directory_is_answered_with_the_way_out(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ReportDirUnusable, match="--report-dir"):
        RunWriter(tmp_path, new_header())
