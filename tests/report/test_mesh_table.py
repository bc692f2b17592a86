"""The table of trainers on meshes: each entry summarises its cells, and everything that is not right has a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from plumbline.core.backend import BACKENDS
from plumbline.core.cell import Cell
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.results.run import Run
from plumbline.workloads import WORKLOADS

CI = Path(__file__).parents[2] / "ci"
MARGINS = "| precision |\n|---|\n| 32 |"


@pytest.fixture
def mesh_table(program: Callable[[Path], ModuleType]) -> ModuleType:
    return program(CI / "mesh_table.py")


def cell(subject: str, workload: str, backend: str, precision: str = "32") -> Cell:
    return Cell(subject, workload, backend, Topology(1, 4), precision, "cpu")


def test_each_square_counts_its_cells_and_the_rest_is_explained(
    mesh_table: ModuleType, build_run: Callable[..., Run]
) -> None:
    first = build_run(
        {
            cell("torch", "mlp", "fsdp"): [Outcome.PASSED],
            cell("torch", "lm-tokens", "fsdp"): [Outcome.DEVIATES],
            cell("torch", "mlp", "hsdp"): [Outcome.PASSED],
            cell("trl", "mlp", "fsdp"): [Outcome.UNSUPPORTED],
        }
    )
    second = build_run({cell("deepspeed", "mlp", "fsdp"): [Outcome.FAILED]})
    page = mesh_table.page([first, second], MARGINS)
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    squares = {line[0].strip("| "): [one.strip("| ") for one in line[1:]] for line in lines[:5]}
    assert squares["subject"] == ["fsdp", "hsdp"]
    assert squares["torch"] == ["C 2/2", "Y 1/1"]
    assert squares["trl"] == ["-", ""]
    assert squares["deepspeed"] == ["N 0/1", ""]
    assert "`deepspeed-mlp-fsdp-1x4-32` **failed**" in page
    assert f"| lm-tokens | 1 | {WORKLOADS['lm-tokens'].exposes} | torch fsdp |" in page
    assert "| trl | fsdp | 1 |" in page
    assert "Not in these runs: reference, fabric, sentence-transformers, ray, composer." in page
    assert page.endswith(f"{MARGINS}\n")


def test_margins_are_those_of_meshes_alone(mesh_table: ModuleType) -> None:
    assert mesh_table.margins(f"# Detection\n\n| all |\n\n{mesh_table.MARGINS}\n\n{MARGINS}") == MARGINS
    with pytest.raises(SystemExit, match="run pytest suites/detection"):
        mesh_table.margins("# Detection\n")


def test_what_is_selected_is_there(mesh_table: ModuleType) -> None:
    assert set(mesh_table.WORKLOADS) <= set(WORKLOADS)
    assert {one.smallest.devices for one in BACKENDS.values()} <= set(range(2 * mesh_table.DEVICES + 1))
