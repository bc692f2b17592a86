"""A run as the reference trainer leaves it: every configuration, and some of everything that can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.backend import BACKENDS
from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.topology import Topology
from harness.store.fingerprint import ComparabilityKey, Fingerprint
from harness.store.records import Footer, Header, Result
from harness.store.run import Run, RunWriter

TOPOLOGIES = [Topology(1, 1), Topology(1, 2), Topology(1, 8), Topology(2, 2), Topology(2, 4), Topology(4, 2)]
WORKLOADS = ["linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens"]
CHECKS = ["coverage", "gradients", "updates", "synchrony"]
MACHINE = Fingerprint(
    key=ComparabilityKey(accelerator="cpu", device="A CPU", cpu="A CPU", cpu_cores=2, torch="2.13"),
    torch="2.13.0+cpu",
    python="3.11.7",
    commit="0123456789abcdef0123456789abcdef01234567",
)

NOWHERE = Path("not-on-disk")

BuildRun = Callable[..., Run]


def _cells() -> list[Cell]:
    cells = [
        Cell("reference", workload, backend.name, topology, precision, "cpu")
        for backend in (b for b in BACKENDS.values() if b.name != "auto")
        for topology in TOPOLOGIES
        if backend.fits(topology)
        for precision in ("32", "16", "bf16", "64")
        for workload in WORKLOADS
    ]
    cells += [Cell("my-ddp", name, "ddp", Topology(1, 2), "32", "cpu") for name in WORKLOADS]
    cells += [Cell("my-ddp", name, "ddp", Topology(2, 4), "16", "cpu") for name in WORKLOADS]
    return cells


def _findings(cell: Cell) -> list[Finding]:
    found = [Finding(check, Outcome.PASSED, "as one device", error_x_noise=0.8) for check in CHECKS]
    if cell.workload == "cnn-batchnorm" and cell.backend != "none":
        found[1] = Finding("gradients", Outcome.DEVIATES, "statistics per replica", error_x_noise=2e6)
    if cell.workload == "contrastive" and cell.backend == "ddp2" and cell.precision == "16":
        found[1] = Finding(
            "gradients",
            Outcome.FAILED,
            "the gradient is the sum over nodes | not the mean: <b>2.0 × too large</b>",
            cause="sum-instead-of-mean",
            family="averaging",
            error_x_noise=4.1e6,
            step=0,
            parameter="tower.0.weight",
            rank=1,
        )
    if cell.precision == "64" and cell.backend == "dp" and cell.workload == "mlp":
        found = [Finding("launch", Outcome.CRASHED, "rank 0 ended with signal 11\nfatal error")]
    if cell.subject == "my-ddp" and cell.precision == "16":
        found = [Finding("launch", Outcome.UNSUPPORTED, "my-ddp does not declare 16")]
    return found


@pytest.fixture(scope="session")
def cells() -> list[Cell]:
    """Every configuration of the reference trainer, and a second subject."""
    return _cells()


@pytest.fixture(scope="session")
def build_run() -> BuildRun:
    """Makes a run of cells and of what each of them ended in (a finding an outcome, none: missing)."""

    def build(ends: dict[Cell, list[Outcome]], *, finished: bool = True, simulated: bool = True) -> Run:
        header = Header.of(ends, command=["pytest"], options={}, fingerprint=MACHINE, simulated=simulated)
        results = tuple(
            Result.of(cell, Finding(f"check{place}", outcome, "told"), "pytest -k it", 0.5)
            for cell, outcomes in ends.items()
            for place, outcome in enumerate(outcomes)
        )
        return Run(header, results, Footer.of(results, 0) if finished else None, NOWHERE)

    return build


@pytest.fixture(scope="session")
def realistic_run(cells: list[Cell]) -> Run:
    """A finished run over all of ``cells``."""
    header = Header.of(
        cells,
        command=["/somewhere/bin/pytest", "suites/", "--gpus", "8"],
        options={"gpus": 8},
        fingerprint=MACHINE,
        simulated=True,
    )
    results = tuple(
        Result.of(cell, finding, f"pytest suites/ -k {cell.id}", 0.4) for cell in cells for finding in _findings(cell)
    )
    return Run(header, results, Footer.of(results, 1), NOWHERE)


@pytest.fixture
def recorded_run(realistic_run: Run, tmp_path: Path) -> Path:
    """The folder of that run on disk."""
    assert realistic_run.footer is not None
    with RunWriter(tmp_path, realistic_run.header) as writer:
        writer.write(*realistic_run.results)
        writer.close(realistic_run.footer)
    return writer.path
