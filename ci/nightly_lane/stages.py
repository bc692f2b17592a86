"""The night's pieces; each takes at most about twenty minutes on two cores."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nightly_lane.piece import Piece

RIGHT_TRAINERS = ("reference", "train-loop", "torch")
OLD_TORCH = ("2.4.1", "2.6.0")
RELEASED = ("lightning", "fabric", "accelerate", "transformers", "ignite")

BY_PARTS = (
    "stages or tensor_parallel or sharded or expert_parallel or sequence_parallel or three_dimensions or trackers"
)
DETECTION = {
    "right trainers": "right",
    "meshes": f"not right and ({BY_PARTS})",
    "other mistakes": f"not right and not ({BY_PARTS})",
}
"""The parts of the detection suite with their selections; together they have every test."""


def pieces(root: Path, workers: int, scripts: Sequence[str] = ()) -> list[Piece]:
    """Return all pieces in their order.

    ``workers`` is the number of pytest processes in the first stages, and ``scripts`` are options of
    ``check_scripts.py``.
    """
    return [*_tests(root, workers), *_suites(workers), *_programs(scripts)]


def _tests(root: Path, workers: int) -> Iterator[Piece]:
    """Yield the project's own tests by folder, including ``nightly`` ones, with many examples of each property."""
    options = ("-m", "", "--hypothesis-profile", "nightly", "-n", str(workers), "--dist", "loadgroup")
    places = [*(root / "tests").glob("*/"), *(root / "tests").glob("test_*.py")]
    for place in sorted(places):
        if place.is_file() or any(place.rglob("test_*.py")):
            yield Piece("tests", (sys.executable, "-m", "pytest", f"tests/{place.name}", *options), place.name)


def _suites(workers: int) -> Iterator[Piece]:
    pytest = (sys.executable, "-m", "pytest")
    conformance = (*pytest, "suites/conformance")
    for part, selected in DETECTION.items():
        command = (*pytest, "suites/detection", "-n", str(workers), "-k", selected, "--report-dir", "{folder}")
        yield Piece("detection", command, part)
    yield Piece("main", (*pytest, "suites/", "--gpus", "8"), "README's job")
    yield Piece("main", (*conformance, "--gpus", "8", "--backends", "balanced"), "every balanced cell")
    for name in RIGHT_TRAINERS:
        yield Piece("right-trainers", (*conformance, "--gpus", "4", "--subject", name), name)
    for name in RELEASED:
        yield Piece("released-trainers", (sys.executable, "ci/released.py", name, "--gpus", "4"), name)


def _programs(scripts: Sequence[str]) -> Iterator[Piece]:
    """Yield the programs of ``ci/``, with fewer draws than in the committed reports."""
    python = sys.executable
    yield Piece("gate", (python, "ci/gate.py"))
    yield Piece("meshes", (python, "ci/mesh_table.py", "--report={folder}/meshes.md"))
    yield Piece("own-environments", (python, "ci/mesh_table.py", "--backends=ddp", "--report={folder}/ddp.md"))
    yield Piece("false-alarms", (python, "ci/false_alarms.py", "--seeds=60"))
    yield Piece("judge-hunt", (python, "ci/judge_hunt.py", "--minutes=6", "--folder={folder}"))
    yield Piece("faults", (python, "ci/faults.py", "--times=1", "--report={folder}/faults.md"))
    tearing_down = (python, "ci/teardowns.py", "--launches=30")
    yield Piece("teardowns", tearing_down, needs=("lightning", "accelerate", "ignite"))
    yield Piece("fuzz", (python, "ci/fuzz", "--seconds=30", "--report={folder}/fuzz.md"), needs=("atheris",))
    yield Piece("launchers", (python, "ci/launchers.py", "--lose=3"), needs=("ray",), cannot=3)
    yield Piece("greetings", (python, "ci/bench_greetings.py", "--report={folder}/greetings.md"))
    yield Piece("history", (python, "ci/history.py", "--report={folder}/history.md"))
    for part in ("published", "mistakes"):
        yield Piece("scripts-by-others", (python, "ci/scripts_by_others.py", "--part", part), part)
    for part in ("scripts", "half-judged", "mistakes"):
        results = "--write={folder}/results.jsonl"
        command = (python, "ci/check_scripts.py", "--part", part, "--jobs=2", results, *scripts)
        yield Piece("check-scripts", command, part)
    yield Piece("deepspeed", (python, "-m", "pytest", "tests/check/test_deepspeed.py", "-m", ""), needs=("deepspeed",))
    yield Piece("joint-campaign", (python, "ci/joint_campaign.py", "--minutes=10", "--least-named=0.9"))
    yield Piece("marked-tests", (python, "ci/bench_ranks.py"), needs=("expecttest",))
    yield Piece("wheel", (python, "ci/try_wheel.py"), "the newest torch", needs=("hatchling",))
    for torch in OLD_TORCH:
        yield Piece("wheel", (python, "ci/try_wheel.py", "--torch", torch), f"torch {torch}", needs=("hatchling",))
    yield Piece("accelerator", ("ci/accelerator",), cannot=3)
