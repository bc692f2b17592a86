"""Which pieces a change can touch: what passed before a change of files that it does not read stays passed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from nightly_lane.piece import Piece

PROGRAMS = {
    "ci/bench_greetings.py": "greetings",
    "ci/bench_ranks": "marked-tests",
    "ci/check_scripts": "check-scripts",
    "ci/false_alarms.py": "false-alarms",
    "ci/fuzz/": "fuzz",
    "ci/history": "history",
    "ci/joint_campaign.py": "joint-campaign",
    "ci/judge_hunt": "judge-hunt",
    "ci/launchers.py": "launchers",
    "ci/nightly_lane/": "",
    "ci/random_trainings.py": "joint-campaign",
    "ci/scripts_by_others": "scripts-by-others",
    "ci/teardowns": "teardowns",
    "tests/nightly.txt": "",
}
"""How the names of files begin that one stage alone reads, apart from the project's own tests of them; its name."""

TESTS_OF_PROGRAMS = ("tests: ci", "tests: docs", "tests: launch", "tests: test_house.py")
"""The pieces that read the programs of ``ci/``."""

OTHER_READERS = {"tests/check/test_deepspeed.py": "deepspeed", "tests/wheel/test_same_names.py": "gate"}
"""Files of tests that another stage runs too; its name."""


def reaches(files: Iterable[str], piece: Piece) -> bool:
    """Whether a change of any of these files, named from the root of the checkout, can touch the piece.

    A test module is read by its own piece and by the tests of the code's structure; a program of ``PROGRAMS`` by its
    stage and by the tests of ``ci/``. ``reports/`` is read by no piece. Every other file counts for every piece.
    """
    return any(_reads(piece, file) for file in files)


def _reads(piece: Piece, file: str) -> bool:
    if file.startswith("reports/"):
        return False
    if module := re.fullmatch(r"tests/(\w+)/(?:.*/)?test_\w+\.py", file):
        readers = {f"tests: {module[1]}", "tests: test_house.py", OTHER_READERS.get(file)}
        return bool(readers & {piece.name, piece.stage})
    for start, stage in PROGRAMS.items():
        if file.startswith(start):
            return piece.stage == stage or piece.name in TESTS_OF_PROGRAMS
    return True


def changed_files(root: Path, commit: str) -> Callable[[str], list[str] | None]:
    """Return what tells which files differ between an earlier commit and ``commit``; None where git cannot tell."""

    @cache
    def between(earlier: str) -> list[str] | None:
        command = ["git", "diff", "--name-only", "--no-renames", "-z", earlier, commit, "--"]
        told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        return [name for name in told.stdout.split("\0") if name] if told.returncode == 0 else None

    return between
