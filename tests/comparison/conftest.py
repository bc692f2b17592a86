"""Runs with figures, built from words: cells, samples and outcomes; and simulated noise of launches."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import ComparabilityKey, Fingerprint
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Measurement, PlannedCell, Result
from plumbline.results.run import Run
from plumbline.results.run_writer import RunWriter

KEY = ComparabilityKey(accelerator="cuda", device="A GPU", device_count=8, cpu="A CPU", cpu_cores=8, torch="2.13")
UNITS = {
    "throughput": ("samples/s", "higher"),
    "step_p50": ("s", "lower"),
    "memory_allocated_peak": ("bytes", "lower"),
    "data_wait": ("share", "lower"),
    "out_of_memory": ("count", "lower"),
}


@pytest.fixture(scope="session")
def place() -> Callable[..., Cell]:
    """Makes a cell from a table's name for it."""
    return _place


def _place(words: str = "mlp ddp 1x2 32", subject: str = "reference", accelerator: str = "cuda") -> Cell:
    workload, backend, topology, precision = words.split()
    nodes, gpus = map(int, topology.split("x"))
    return Cell(subject, workload, backend, Topology(nodes, gpus), precision, accelerator)


@pytest.fixture(scope="session")
def measured() -> Callable[..., Measurement]:
    """Makes a cell's figure from its launches' measurements."""

    def measurement(cell: Cell, metric: str, samples: Sequence[float], **others) -> Measurement:
        unit, better = UNITS[metric]
        values = {
            **PlannedCell.of(cell).model_dump(),
            "metric": metric,
            "unit": unit,
            "better": better,
            "value": median(samples) if samples else None,
            "samples": tuple(map(float, samples)),
            "workload_key": "k",
        }
        return Measurement(**(values | others))

    return measurement


def _header(cells: Sequence[Cell], *, key=KEY, simulated=False, options=None, **others) -> Header:
    header = Header.of(
        cells, command=["pytest"], options=options or {}, fingerprint=Fingerprint(key=key), simulated=simulated
    )
    return header.model_copy(update=others)


BuildRun = Callable[..., Run]


@pytest.fixture(scope="session")
def build_run() -> BuildRun:
    """Makes a run of cells with their outcomes (a finding per outcome) and measurements."""

    def build(
        ends: Mapping[Cell, Sequence[Outcome]] | None = None,
        figures: Sequence[Measurement] = (),
        *,
        finished: bool = True,
        cells: Sequence[Cell] | None = None,
        **header,
    ) -> Run:
        ends = ends or {}
        planned = list(cells if cells is not None else ends)
        results = tuple(
            Result.of(one, Finding(f"check{index}", outcome, "told"), "pytest -k it", 0.5)
            for one, outcomes in ends.items()
            for index, outcome in enumerate(outcomes)
        )
        footer = Footer.of(results, 0) if finished else None
        return Run(_header(planned, **header), results, footer, Path("not-on-disk"), False, tuple(figures))

    return build


@pytest.fixture
def on_disk(tmp_path) -> Callable[[Run], str]:
    """Writes a run, and returns its folder."""

    def write(run: Run) -> str:
        with RunWriter(Path(mkdtemp(dir=tmp_path)), run.header) as writer:
            writer.write(*run.results, *run.measurements)
            if run.footer:
                writer.close(run.footer)
        return str(writer.path)

    return write


@pytest.fixture(scope="session")
def launches() -> Callable[..., list[float]]:
    """Draws measurements of launches with multiplicative noise of standard deviation ``spread`` (default: 2 %)."""

    def draw(noise: random.Random, number: int, center: float = 0.01, spread: float = 0.02) -> list[float]:
        return [center * noise.lognormvariate(0, spread) for _ in range(number)]

    return draw
