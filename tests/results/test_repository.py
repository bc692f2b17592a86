"""The recorded commit of a trainer is that of the repository that has its file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from plumbline.machine.software import repository_commit


def git(root: Path, *command: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *command], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A trainer in a folder of a repository, committed."""
    file = tmp_path / "trainers" / "mine.py"
    file.parent.mkdir()
    file.write_text("1\n")
    (tmp_path / "other.py").write_text("1\n")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first", "--no-verify")
    return file


def test_it_is_the_commit_of_the_repository(trainer: Path) -> None:
    assert repository_commit(trainer) == git(trainer.parent, "rev-parse", "HEAD")


@pytest.mark.parametrize("changed", ["trainers/mine.py", "other.py"])
def test_code_that_has_changed_is_dirty(trainer: Path, changed: str) -> None:
    (trainer.parents[1] / changed).write_text("2\n")
    assert repository_commit(trainer) == git(trainer.parent, "rev-parse", "HEAD") + "-dirty"


def test_a_file_that_is_not_committed_yet_is_dirty_and_new_notes_are_not(trainer: Path) -> None:
    commit = git(trainer.parent, "rev-parse", "HEAD")
    (trainer.parent / "notes.md").write_text("new\n")
    (trainer.parent / "another.py").write_text("new\n")
    assert repository_commit(trainer) == commit
    assert repository_commit(trainer.parent / "another.py") == f"{commit}-dirty"


@pytest.mark.parametrize("place", ["ignored", "venv/lib/python3.11/site-packages"])
def test_what_is_installed_or_ignored_in_a_repository_is_not_part_of_it(trainer: Path, place: str) -> None:
    folder = trainer.parents[1] / place
    folder.mkdir(parents=True)
    (folder / "library.py").write_text("1\n")
    assert repository_commit(folder / "library.py") is None


def test_outside_of_a_repository_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1\n")
    assert repository_commit(tmp_path / "mine.py") is None
    git(tmp_path, "init", "--quiet")
    assert repository_commit(tmp_path / "mine.py") is None, "there is no commit yet"
