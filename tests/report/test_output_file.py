"""The file that an option names is written through links, and refused in time if it cannot be written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from plumbline.core.errors import PlanError
from plumbline.report.output_file import OutputError, refuse_file_as_folder, refuse_unwritable, write_output


def test_a_symlink_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    refuse_unwritable("--json", link)
    write_output(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert {file.name for file in tmp_path.rglob("*")} == {"there", "target.json", "link.json"}


def test_a_symlink_without_target_makes_the_target(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    write_output(tmp_path / "link.json", "new")
    assert (tmp_path / "target.json").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refuse_unwritable("--json", pipe)  # opening it does not wait for a reader
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "new")
    reader.join()
    assert received == ["new"]
    assert pipe.is_fifo()


def test_an_open_stream_is_written_and_not_replaced(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w+", encoding="utf-8") as output:
        output.write("before\n")
        output.flush()
        write_output(Path(f"/dev/fd/{output.fileno()}"), "new\n")
        output.seek(0)
        assert output.read() == "before\nnew\n"


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write \S*/nowhere/x\.json: No such file or directory$"):
        write_output(tmp_path / "nowhere" / "x.json", "new")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (".", "is a folder: name a file"),
        ("nowhere/x", r"there is no folder \S*/nowhere for x: create it first"),
        ("afile/x", r"\S*/afile is a file, not a folder: name a folder"),
        ("afile/deeper/x", r"\S*/afile is a file, not a folder: name a folder"),
        ("dangling", r"cannot create target in \S*/nowhere: No such file or directory"),
        ("x" * 256, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_with_its_option(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "afile").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "target")
    with pytest.raises(PlanError, match=f"^--json: .*{sentence}"):
        refuse_unwritable("--json", tmp_path / name)
    assert {file.name for file in tmp_path.iterdir()} == {"afile", "dangling"}


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    refuse_file_as_folder("--folder", tmp_path / "new" / "deeper")
    with pytest.raises(PlanError, match=r"--folder: \S*/afile is a file"):
        refuse_file_as_folder("--folder", tmp_path / "afile")
