"""The ends of logs: bounded, and never from outside the run's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plumbline.results.files import LONGEST_LINE, MOST_LINES, MOST_LOGS, log_tails, trace_folder


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    """The folder of one cell's evidence, in the run ``tmp_path / "run"``."""
    folder = tmp_path / "run" / "traces" / "a-cell"
    folder.mkdir(parents=True)
    return folder


def run_of(cell: Path) -> Path:
    return cell.parent.parent


def test_the_last_lines_are_kept(cell: Path) -> None:
    (cell / "rank-0.log").write_text("\n".join(f"line {number}" for number in range(1000)))
    ((ranks, tail),) = log_tails(run_of(cell), "a-cell")
    assert ranks == "rank 0"
    assert tail.splitlines() == [f"line {number}" for number in range(1000 - MOST_LINES, 1000)]


def test_a_long_line_is_cut_and_a_huge_file_is_not_read(cell: Path) -> None:
    with (cell / "rank-0.log").open("wb") as log:
        log.truncate(1 << 33)  # a hole of 8 GiB
        log.seek(0, os.SEEK_END)
        log.write(b"\n" + b"x" * 100_000)
    ((_, tail),) = log_tails(run_of(cell), "a-cell")
    assert len(tail) == LONGEST_LINE


def test_ranks_that_said_the_same_stand_together(cell: Path) -> None:
    for rank in (0, 1, 2, 10):
        (cell / f"rank-{rank}.log").write_text("the same" if rank else "of its own")
    (cell / "rank-3.log").write_text("\n")
    assert log_tails(run_of(cell), "a-cell") == [("rank 0", "of its own"), ("rank 1, rank 2, rank 10", "the same")]


def test_launches_that_went_on_have_their_own(cell: Path) -> None:
    for launch in ("resumed", "saved"):
        (cell / launch).mkdir()
        (cell / launch / "rank-0.log").write_text(launch)
    assert log_tails(run_of(cell), "a-cell") == [("resumed, rank 0", "resumed"), ("saved, rank 0", "saved")]


def test_only_a_few_are_shown(cell: Path) -> None:
    for rank in range(20):
        (cell / f"rank-{rank}.log").write_text(f"rank {rank}")
    assert len(log_tails(run_of(cell), "a-cell")) == MOST_LOGS


def test_bytes_that_are_no_text_are_shown_somehow(cell: Path) -> None:
    (cell / "rank-0.log").write_bytes(b"\xff\xfe broken")
    assert log_tails(run_of(cell), "a-cell") == [("rank 0", "\ufffd\ufffd broken")]


@pytest.mark.parametrize("name", ["../../secret", "..", ".", "", "/etc", "a\0b", "x" * 5000, "not-there"])
def test_a_name_that_leads_elsewhere_has_no_evidence(cell: Path, name: str) -> None:
    secret = run_of(cell).parent / "secret"
    secret.mkdir()
    (secret / "rank-0.log").write_text("secret")
    (cell.parent / "rank-0.log").write_text("of no cell")
    assert trace_folder(run_of(cell), name) is None
    assert log_tails(run_of(cell), name) == []


def test_links_are_not_followed(cell: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "rank-0.log").write_text("secret")
    (cell / "rank-0.log").symlink_to(secret / "rank-0.log")
    (cell / "saved").symlink_to(secret)
    (cell.parent / "linked").symlink_to(secret)
    assert log_tails(run_of(cell), "a-cell") == []
    assert log_tails(run_of(cell), "linked") == []


def test_what_is_no_file_is_not_waited_for(cell: Path) -> None:
    os.mkfifo(cell / "rank-0.log")
    assert log_tails(run_of(cell), "a-cell") == []
