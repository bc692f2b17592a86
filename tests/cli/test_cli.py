"""``plumbline judge``: the same judge gives the same verdicts on the same traces; another judge's changes are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import plumbline.engine.examine
from plumbline.cli.main import main
from plumbline.engine.examine import examine
from plumbline.engine.rejudge import rejudge
from plumbline.launch.cell_launch import Settings
from plumbline.machine.fingerprint import Fingerprint
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import line_of, read_run
from plumbline.results.run_writer import RunWriter

TRAINERS = Path(__file__).parent / "trainers.py"

PLACES = [
    ("right", "mlp", "1x2", "32"),
    ("right", "cnn-batchnorm", "1x3", "bf16"),
    ("wrong", "lm-tokens", "2x2", "32"),
    ("wrong", "linear-exact", "1x2", "64"),
    ("raising", "mlp", "1x2", "32"),
    ("dying", "mlp", "1x2", "32"),
]


@pytest.fixture(scope="module")
def judged_in_one_thread():
    """Judge in one thread, like a session: a sum's last digit depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, warm_pool, cell_of, judged_in_one_thread):
    """Return a run with the traces of all its cells, as ``--keep-traces`` leaves it."""
    cells = [cell_of(workload, "ddp", place, precision, subject=name) for name, workload, place, precision in PLACES]
    header = Header.of(cells, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    writer = RunWriter(tmp_path_factory.mktemp("reports"), header)
    results = []
    for cell in cells:
        examined = examine(warm_pool(TRAINERS), cell, writer.path / "traces" / cell.id, Settings(600))
        results += [Result.of(cell, finding, "pytest …", examined.seconds) for finding in examined.findings]
    writer.write(*results)
    writer.close(Footer.of(results, 1))
    return writer.path


@pytest.fixture
def run(recorded):
    return recorded


def test_the_same_judge_says_the_same_byte_for_byte(run):
    """DESIGN: findings depend only on traces, not on training, clocks or generators."""
    whole = [cell for cell in rejudge(read_run(run)) if not cell.cell.startswith("dying")]
    assert len(whole) == len(PLACES) - 1
    for cell in whole:
        assert cell.now, cell.obstacle
        assert b"".join(map(line_of, cell.now)) == b"".join(map(line_of, cell.recorded))


def test_findings_are_the_same_lines_as_in_the_file(run):
    lines = (run / "results.jsonl").read_bytes()
    for cell in rejudge(read_run(run)):
        for result in cell.now:
            assert line_of(result) in lines


def test_nothing_changed_is_said_and_is_success(run, capsys):
    assert main(["judge", str(run)]) == 0
    said = capsys.readouterr().out
    assert "5 cells judged again: 5 unchanged, 0 changed; 1 could not be judged, 0 without traces" in said


def test_a_rank_that_died_has_no_evidence(run, capsys):
    main(["judge", str(run)])
    said = capsys.readouterr().out
    assert "dying-mlp-ddp-1x2-32\n  not judged again: there is no trace of rank" in said


def test_another_judge_s_verdict_is_shown(run, capsys, monkeypatch):
    from dataclasses import replace

    from plumbline.core.outcome import Outcome

    present = plumbline.engine.examine.judge

    def stricter(recording):
        return tuple(
            replace(finding, outcome=Outcome.FAILED, cause="never-good-enough", family="sync", message="not so")
            if finding.check == "gradients"
            else finding
            for finding in present(recording)
        )

    monkeypatch.setattr(plumbline.engine.examine, "judge", stricter)
    assert main(["judge", str(run)]) == 1
    said = capsys.readouterr().out
    assert "right-mlp-ddp-1x2-32\n  gradients: was passed:" in said
    assert "is  failed (sync: never-good-enough): not so" in said


def test_traces_that_were_not_kept_are_counted(run, capsys):
    hidden = run / "traces" / "right-mlp-ddp-1x2-32"
    hidden.rename(run / "elsewhere")
    try:
        assert main(["judge", str(run)]) == 0
    finally:
        (run / "elsewhere").rename(hidden)
    assert "1 without traces" in capsys.readouterr().out


def test_evidence_that_is_cut_off_is_not_judged(run, capsys):
    file = run / "traces" / "right-mlp-ddp-1x2-32" / "rank-1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    try:
        assert main(["judge", str(run)]) == 0
    finally:
        file.write_bytes(whole)
    assert "is not a complete trace" in capsys.readouterr().out


def test_there_is_no_run(tmp_path, capsys):
    assert main(["judge", str(tmp_path)]) == 2
    assert "There is no run at" in capsys.readouterr().err
