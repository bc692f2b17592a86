"""Figures with the conformance beside them, and the old documentation's claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import ComparabilityKey, Fingerprint
from plumbline.report.tables.claims import Claim, claims
from plumbline.report.tables.measured import NOT_EXAMINED, measured_cells
from plumbline.results.records import Expected, Measurement, Result
from plumbline.results.run import Run

BuildRun = Callable[..., Run]
Measure = Callable[..., Measurement]

GPU = Fingerprint(key=ComparabilityKey(accelerator="cuda", device="GPU", device_count=8), compute_capability="9.0")


def timed_run(build_run: BuildRun, measure: Measure, found: list[Outcome], **fields: object) -> Run:
    """Return a run with a configuration's cells, their outcomes, and timings."""
    examined = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    timed = dataclasses.replace(examined, workload="perf-mlp")
    others = [dataclasses.replace(examined, workload=f"w{index}") for index in range(len(found))]
    run = build_run({cell: [outcome] for cell, outcome in zip(others, found, strict=True)})
    return dataclasses.replace(run, measurements=(measure(timed, "throughput", 100.0, **fields),))


@pytest.mark.parametrize(
    ("found", "mark", "wrong"),
    [
        ([Outcome.PASSED], "Y", False),
        ([Outcome.PASSED, Outcome.DEVIATES], "C", False),
        ([Outcome.PASSED, Outcome.UNSUPPORTED], "Y", False),
        ([Outcome.PASSED, Outcome.FAILED], "N", True),
        ([Outcome.CRASHED], "?", True),
        ([Outcome.ERRORED], "?", True),
        ([Outcome.TIMED_OUT], "?", True),
        ([Outcome.UNSUPPORTED], NOT_EXAMINED, False),
        ([], NOT_EXAMINED, False),
    ],
)
def test_conformance_is_that_of_the_same_configuration(
    build_run: BuildRun, measured: Measure, found: list[Outcome], mark: str, wrong: bool
) -> None:
    (cell,) = measured_cells(timed_run(build_run, measured, found))
    assert (cell.conformance.mark, cell.conformance.wrong) == (mark, wrong)


def test_what_is_known_to_fail_is_not_struck_through(build_run: BuildRun, measured: Measure) -> None:
    run = timed_run(build_run, measured, [Outcome.FAILED])
    said = Expected(outcome=Outcome.FAILED, reason="known", entry="x.toml, entry 1")
    run = dataclasses.replace(run, results=tuple(one.model_copy(update={"expected": said}) for one in run.results))
    (cell,) = measured_cells(run)
    assert (cell.conformance.mark, cell.conformance.wrong) == ("K", False)


@pytest.mark.parametrize(
    "other",
    [
        {"subject": "another"},
        {"backend": "dp"},
        {"topology": Topology(2, 2)},
        {"precision": "16"},
        {"accelerator": "cuda"},
    ],
)
def test_another_configuration_says_nothing(build_run: BuildRun, measured: Measure, other: dict[str, object]) -> None:
    examined = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cpu")
    run = build_run({dataclasses.replace(examined, **other): [Outcome.FAILED]})
    figure = measured(dataclasses.replace(examined, workload="perf-mlp"), "throughput", 1.0)
    (cell,) = measured_cells(dataclasses.replace(run, measurements=(figure,)))
    assert cell.conformance.mark == NOT_EXAMINED


def test_the_worst_rank_speaks_for_the_cell(build_run: BuildRun, measured: Measure) -> None:
    run = timed_run(build_run, measured, [])
    cell = Cell("reference", "perf-mlp", "ddp", Topology(1, 2), "32", "cpu")
    memory = [
        measured(cell, "memory_allocated_peak", value, rank=rank, better="lower")
        for rank, value in enumerate((5.0, 9.0, None))
    ]
    speeds = [measured(cell, "speed", value, rank=rank, better="higher") for rank, value in enumerate((5.0, 9.0))]
    whole = [measured(cell, "step_p95", 2.0), measured(cell, "step_p95", 7.0, rank=0)]
    (found,) = measured_cells(dataclasses.replace(run, measurements=(*memory, *speeds, *whole)))
    assert found.value("memory_allocated_peak") == 9.0
    assert found.value("speed") == 5.0
    assert found.value("step_p95") == 2.0, "what speaks of all ranks comes before what speaks of one"
    assert found.value("nothing") is None


def claim(run: Run, beginning: str) -> Claim:
    (found,) = [one for one in claims(run) if one.statement.startswith(beginning)]
    return found


def pair_run(
    build_measured_run: BuildRun, measure: Measure, first: dict, second: dict, metric: str, values: tuple
) -> Run:
    """Return a run on GPUs that measured one pair of cells."""
    run = build_measured_run(accelerator="cuda", machine=GPU)
    cell = Cell("reference", "perf-mlp", "ddp", Topology(1, 2), "32", "cuda")
    pairs = zip((first, second), values, strict=True)
    figures = tuple(
        measure(dataclasses.replace(cell, **other), metric, value, low=low, high=high)
        for other, (low, value, high) in pairs
    )
    return dataclasses.replace(run, measurements=figures, results=())


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        (((19, 20, 21), (9, 10, 11)), "yes"),
        (((9, 10, 11), (19, 20, 21)), "no"),
        (((9, 10, 11), (9, 10, 11)), "inconclusive"),
        (((11, 12, 13), (9, 10, 11)), "inconclusive"),
    ],
)
def test_a_claim_holds_where_its_interval_says_so(
    build_measured_run: BuildRun, measured: Measure, values: tuple, answer: str
) -> None:
    run = pair_run(build_measured_run, measured, {}, {"backend": "dp"}, "throughput", values)
    found = claim(run, "ddp is faster")
    assert found.answer == answer
    (pair,) = found.pairs
    assert pair.ratio == values[0][1] / values[1][1]
    assert pair.low <= pair.ratio <= pair.high
    assert pair.conditions == "reference, perf-mlp, ddp over dp, 1×2, 32"


@pytest.mark.parametrize(("half", "answer"), [((4, 4.5, 5), "yes"), ((6, 6.5, 7), "no"), ((4, 5, 6), "inconclusive")])
def test_half_the_memory_is_half_or_less(
    build_measured_run: BuildRun, measured: Measure, half: tuple, answer: str
) -> None:
    values = (half, (10, 10, 10))
    run = pair_run(build_measured_run, measured, {"precision": "16"}, {}, "memory_allocated_peak", values)
    assert claim(run, "16-bit halves").answer == answer


def test_several_pairs_may_disagree(build_measured_run: BuildRun, measured: Measure) -> None:
    run = build_measured_run(accelerator="cuda", machine=GPU)
    cells = [
        Cell("reference", "perf-mlp", backend, Topology(1, gpus), "32", "cuda")
        for backend in ("ddp", "dp")
        for gpus in (2, 4)
    ]
    figures = tuple(
        measured(cell, "throughput", value) for cell, value in zip(cells, (20.0, 10.0, 10.0, 20.0), strict=True)
    )
    found = claim(dataclasses.replace(run, measurements=figures, results=()), "ddp is faster")
    assert (found.answer, found.counted) == ("partly", "in 1 of 2 pairs")


def test_what_is_wrong_supports_no_claim(build_measured_run: BuildRun, measured: Measure) -> None:
    values = ((19, 20, 21), (9, 10, 11))
    run = pair_run(build_measured_run, measured, {}, {"backend": "dp"}, "throughput", values)
    bad = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", "cuda")
    failed = Result.of(bad, Finding("gradients", Outcome.FAILED, "wrong"), "", None)
    found = claim(dataclasses.replace(run, results=(failed,)), "ddp is faster")
    assert found.answer == "not measured"
    assert "its speed does not count" in (found.pairs[0].wrong or "")


@pytest.mark.parametrize(
    ("machine", "options", "simulated", "answer"),
    [
        (GPU, {}, False, "yes"),
        (GPU, {}, True, "needs a GPU"),
        (GPU, {"oversubscribe": True}, False, "needs a GPU for each rank"),
        (GPU.model_copy(update={"compute_capability": "6.1"}), {}, False, "needs tensor cores"),
        (GPU.model_copy(update={"compute_capability": None}), {}, False, "needs tensor cores"),
        (GPU.model_copy(update={"compute_capability": "9" * 5000 + ".0"}), {}, False, "needs tensor cores"),
        (Fingerprint(key=ComparabilityKey(accelerator="cpu")), {}, False, "needs a GPU"),
    ],
)
def test_a_claim_about_tensor_cores_needs_them(
    build_measured_run: BuildRun,
    measured: Measure,
    machine: Fingerprint,
    options: dict[str, object],
    simulated: bool,
    answer: str,
) -> None:
    run = pair_run(build_measured_run, measured, {"precision": "16"}, {}, "throughput", ((19, 20, 21), (9, 10, 11)))
    changed = {"fingerprint": machine, "options": options, "simulated": simulated}
    header = run.header.model_copy(update=changed)
    assert claim(dataclasses.replace(run, header=header), "16-bit is faster").answer == answer


def test_a_ratio_of_nothing_is_none(build_measured_run: BuildRun, measured: Measure) -> None:
    run = pair_run(build_measured_run, measured, {}, {"backend": "dp"}, "throughput", ((1, 1, 1), (0, 0, 0)))
    assert claim(run, "ddp is faster").pairs == ()
