"""A run from an untrusted source: nothing outside its folder is read or written, and nothing in it runs or acts."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from plumbline.cli.main import main
from plumbline.core.cell import Cell
from plumbline.core.errors import TraceError
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.engine.rejudge import rejudge
from plumbline.evidence import read, tensor_store
from plumbline.evidence.trace import RankTrace
from plumbline.evidence.trace_file import write_rank
from plumbline.machine.fingerprint import Fingerprint
from plumbline.pytest_plugin.cases import ConformanceCase
from plumbline.results.files import RunNotFound, trace_folder, write_text
from plumbline.results.header_footer import Footer, Header, WorkloadSource
from plumbline.results.records import Result
from plumbline.results.run import read_run
from plumbline.results.run_writer import RunWriter

HOSTILE = "evil\x1b[31m\x1b]0;title\x07\u202e\x9b31m<script>alert(1)</script>"
CELL = Cell(HOSTILE, "mlp", "ddp", Topology(1, 2), "32", "cpu")


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run whose subject and findings have text that a terminal would interpret."""
    source = WorkloadSource(locator=str(tmp_path / "program.py"), sha256="0")
    header = Header.of(
        [CELL], command=[HOSTILE], options={}, fingerprint=Fingerprint(), simulated=True, workloads={HOSTILE: source}
    )
    writer = RunWriter(tmp_path / "reports", header)
    found = [Result.of(CELL, Finding("gradients", Outcome.FAILED, HOSTILE), HOSTILE, 0.5)]
    writer.write(*found)
    writer.close(Footer.of(found, 1))
    return writer.path


def no_trace(*_):
    raise TraceError(HOSTILE)


def shows_nothing_that_acts(text):
    assert "evil" in text
    assert not {unicodedata.category(sign) for sign in text.replace("\n", "")} & {"Cc", "Cf", "Cs"}


@pytest.mark.parametrize("command", ["judge", "show"])
def test_what_a_run_says_does_not_act_on_a_terminal(run, command, monkeypatch, capsys):
    monkeypatch.setattr("plumbline.engine.rejudge.trace_folder", lambda path, cell: path)
    monkeypatch.setattr("plumbline.engine.rejudge.read_trace", no_trace)
    main([command, str(run), *(["mlp"] if command == "show" else [])])
    said = capsys.readouterr()
    shows_nothing_that_acts(said.out + said.err)


def test_an_error_does_not_act_on_a_terminal_either(tmp_path, capsys):
    assert main(["judge", str(tmp_path / HOSTILE)]) == 2
    shows_nothing_that_acts(capsys.readouterr().err)


def test_what_a_subject_says_does_not_act_in_pytest_s_failures_or_in_junit(run):
    case = object.__new__(ConformanceCase)
    case._item, case._planned = SimpleNamespace(user_properties=[]), SimpleNamespace(cell=CELL)
    with pytest.raises(pytest.fail.Exception) as failed:
        case._end(read_run(run).results, recorded=True)
    shows_nothing_that_acts(str(failed.value))


def test_no_program_runs_because_a_run_names_it(run, tmp_path):
    (tmp_path / "program.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (run / "traces" / CELL.id.replace("/", "")).mkdir(parents=True)
    rejudge(read_run(run))
    assert not (tmp_path / "ran").exists()


def test_a_trace_is_plain_files_of_a_limited_size(tmp_path, monkeypatch):
    whole = tmp_path / "whole.safetensors"
    write_rank(str(whole), RankTrace(rank=0, world_size=1, steps=()))
    assert read.read_rank(whole).rank == 0
    linked, pipe = tmp_path / "rank-0.safetensors", tmp_path / "rank-1.safetensors"
    linked.symlink_to(whole)
    os.mkfifo(pipe)
    for path, why in ((linked, "symbolic link"), (pipe, "it is not a regular file")):
        with pytest.raises(TraceError, match=why):
            read.read_rank(path)
    monkeypatch.setattr(read, "LARGEST_FILE", 10)
    with pytest.raises(TraceError, match="bytes; the limit is 10"):
        read.read_rank(whole)
    folder = tmp_path / "cell"
    folder.symlink_to(tmp_path)
    with pytest.raises(TraceError, match="is a symbolic link, which a trace never contains"):
        read.read_trace(folder)


def test_a_tensor_store_is_plain_files_too(tmp_path):
    stored = tensor_store.TensorStore(str(tmp_path), 1).keep(torch.arange(4.0))
    (file,) = tmp_path.iterdir()
    assert tensor_store.load(str(tmp_path), stored).tolist() == [0, 1, 2, 3]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match="not a regular file"):
        tensor_store.load(str(tmp_path), stored)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TraceError, match="not a regular file"):
        tensor_store.load(str(tmp_path), stored)


def test_pages_are_written_into_the_run_s_own_folder(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "results.jsonl").symlink_to(run / "results.jsonl")
    with pytest.raises(RunNotFound, match="is a symbolic link"):
        read_run(other)
    (other / "mine").write_text("left as it is")
    (run / "page.csv").symlink_to(other / "mine")
    write_text(run / "page.csv", "content")
    assert (other / "mine").read_text() == "left as it is"
    (other / "traces" / "cell").mkdir(parents=True)
    (run / "traces").symlink_to(other / "traces")
    assert trace_folder(run, "cell") is None
    assert trace_folder(Path(other), "cell") is not None
