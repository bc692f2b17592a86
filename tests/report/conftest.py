"""A run like the reference trainer's: every configuration, and some of everything that can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plumbline.core.backend import BACKENDS
from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import ComparabilityKey, Fingerprint
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Measurement, PlannedCell, Result
from plumbline.results.run import Run
from plumbline.results.run_writer import RunWriter

TOPOLOGIES = [Topology(1, 1), Topology(1, 2), Topology(1, 8), Topology(2, 2), Topology(2, 4), Topology(4, 2)]
WORKLOADS = ["linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens"]
CHECKS = ["coverage", "gradients", "updates", "synchrony"]
MACHINE = Fingerprint(
    key=ComparabilityKey(accelerator="cpu", device="A CPU", cpu="A CPU", cpu_cores=2, torch="2.13"),
    torch="2.13.0+cpu",
    python="3.11.7",
    commit="0123456789abcdef0123456789abcdef01234567",
)

MEASURED_IN = {"throughput": "samples/s", "step_p50": "s", "scaling_strong": "share", "scaling_weak": "share"}
MEMORY = ("tensors_parameters", "tensors_gradients", "tensors_optimizer", "tensors_activations")
STEPS = 41

NOWHERE = Path("not-on-disk")

BuildRun = Callable[..., Run]


def _cells() -> list[Cell]:
    cells = [
        Cell("reference", workload, backend.name, topology, precision, "cpu")
        for backend in map(BACKENDS.__getitem__, ("none", "dp", "ddp", "ddp2"))
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
        refusal = "my-ddp does not declare 16"
        found = [Finding("declared", Outcome.UNSUPPORTED, refusal, undeclared=("precision 16",))]
    return found


@pytest.fixture(scope="session")
def cells() -> list[Cell]:
    """Every configuration of the reference trainer, and a second subject."""
    return _cells()


@pytest.fixture(scope="session")
def build_run() -> BuildRun:
    """Makes a run of cells with their outcomes (a finding per outcome; none: missing)."""

    def build(ends: dict[Cell, list[Outcome]], *, finished: bool = True, simulated: bool = True) -> Run:
        header = Header.of(ends, command=["pytest"], options={}, fingerprint=MACHINE, simulated=simulated)
        results = tuple(
            Result.of(cell, Finding(f"check{index}", outcome, "told"), "pytest -k it", 0.5)
            for cell, outcomes in ends.items()
            for index, outcome in enumerate(outcomes)
        )
        return Run(header, results, Footer.of(results, 0) if finished else None, NOWHERE)

    return build


@pytest.fixture(scope="session")
def realistic_run(cells: list[Cell]) -> Run:
    """A finished run over all ``cells``."""
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


@pytest.fixture(scope="session")
def measured() -> Callable[..., Measurement]:
    """Makes a cell's measurement: ``measured(cell, "throughput", 1200.0)``, with bounds of one hundredth."""

    def measure(cell: Cell, metric: str, value: float | None, **fields: object) -> Measurement:
        unit = MEASURED_IN.get(metric, "bytes")
        bounds = {} if value is None else {"low": 0.99 * value, "high": 1.01 * value}
        planned = PlannedCell.of(cell).model_dump()
        named = {"metric": metric, "unit": unit, "better": "higher" if unit != "s" else "lower", "value": value}
        return Measurement(**{**planned, **named, **bounds, "reproduce": f"pytest -k {cell.id}", **fields})

    return measure


def _figures(cell: Cell, measure: Callable[..., Measurement]) -> list[Measurement]:
    """Return figures of a trainer whose devices each have 80 % efficiency; 16 bits are 50 % faster."""
    devices, halved = cell.topology.devices, cell.precision != "32"
    speed = 1000.0 * (1 + 0.8 * (devices - 1)) * (1.5 if halved else 1.0) * (0.7 if cell.backend == "dp" else 1.0)
    step = 32 * devices / speed
    memory = 2.0**20 * (0.6 if halved else 1.0)
    return [
        measure(cell, "throughput", speed),
        measure(cell, "scaling_strong", speed / (1000.0 * devices)),
        measure(cell, "step_p50", step, quantiles=tuple(step * (0.8 + (index / 40) ** 8) for index in range(STEPS))),
        measure(cell, "memory_allocated_peak", 12 * memory, better="lower"),
        *(measure(cell, part, (index + 1) * memory, rank=0) for index, part in enumerate(MEMORY)),
        measure(cell, "data_wait", None, unit="share", refusal="unstable: more launches tell"),
    ]


@pytest.fixture(scope="session")
def build_measured_run(measured: Callable[..., Measurement]) -> Callable[..., Run]:
    """Makes a run that examined and measured ddp and dp; ``wrong`` backends failed."""

    def build(*, accelerator: str = "cpu", wrong: tuple[str, ...] = (), machine: Fingerprint = MACHINE) -> Run:
        places = [(name, Topology(1, gpus)) for name in ("dp", "ddp") for gpus in (2, 4, 8)]
        places = [("none", Topology(1, 1)), *places, ("ddp", Topology(2, 4)), ("ddp2", Topology(2, 4))]
        examined = [Cell("reference", "mlp", *place, "32", accelerator) for place in places]
        timed = [
            Cell("reference", workload, backend, topology, precision, accelerator)
            for workload in ("perf-mlp", "perf-gpt")
            for backend, topology in places
            for precision in ("32", "16")
        ]
        header = Header.of(
            [*examined, *timed],
            command=["pytest", "suites/"],
            options={"seed": 5},
            fingerprint=machine,
            simulated=accelerator == "cpu",
        )
        passed, failed = (
            Finding("gradients", Outcome.PASSED, "as one device", error_x_noise=0.9),
            Finding("gradients", Outcome.FAILED, "the sum", "sum-instead-of-mean", "averaging", 3e6, 0, "w", 1),
        )
        results = tuple(
            Result.of(cell, failed if cell.backend in wrong else passed, f"pytest -k {cell.id}", 0.4)
            for cell in examined
        )
        figures = tuple(figure for cell in timed for figure in _figures(cell, measured))
        return Run(header, results, Footer.of(results, 1 if wrong else 0), NOWHERE, False, figures)

    return build
