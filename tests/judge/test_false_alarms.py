"""A right trainer is not accused, whatever its order of summation, layout, precision and problem."""

from __future__ import annotations

import random

import pytest

from plumbline.core.outcome import Outcome
from plumbline.workloads import WORKLOADS

PLAIN = ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens")

LAYOUTS = (
    ("none", "1x1"),
    ("dp", "1x2"),
    ("dp", "1x3"),
    ("ddp", "1x2"),
    ("ddp", "1x3"),
    ("ddp", "2x2"),
    ("ddp2", "2x2"),
)
ONE_OF_EACH_BACKEND = [
    (backend, topology)
    if (backend, topology) in (("none", "1x1"), ("dp", "1x3"), ("ddp", "1x3"), ("ddp2", "2x2"))
    else pytest.param(backend, topology, marks=pytest.mark.nightly)
    for backend, topology in LAYOUTS
]
"""The other layouts run at night."""

PRECISIONS = ("64", "32", "16", "bf16")
COUPLED = {"cnn-batchnorm": {"dp", "ddp", "ddp2"}, "contrastive": {"ddp", "ddp2"}, "lm-tokens": {"ddp", "ddp2"}}
"""Problems on which a right trainer differs from one device, by DESIGN section 3."""

WORST: dict[tuple[str, str], tuple[float, str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _printed():
    """Print how close right trainers came to the limit (shown with -s)."""
    yield
    for (precision, check), (error, where) in sorted(WORST.items()):
        print(f"right trainers, precision {precision:>4}, {check:>10}: at worst {error:.2f} × noise ({where})")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("workload", PLAIN)
def test_a_right_trainer_is_never_accused(simulation, cell_of, thorough, workload, precision):
    # Otherwise, the precisions of a workload divide the layouts among them.
    first = (PLAIN.index(workload) + PRECISIONS.index(precision)) % len(PRECISIONS)
    for backend, topology in LAYOUTS if thorough else LAYOUTS[first :: len(PRECISIONS)]:
        for seed in range(2 if thorough else 1):
            cell = cell_of(workload, backend, topology, precision)
            problem = simulation.seeded(WORKLOADS[workload], random.Random(f"{cell.id} {seed}").randrange(1 << 30))
            findings = simulation.judge(simulation.right_trace(problem, cell, seed), problem, cell)
            for check, finding in findings.items():
                if finding.error_x_noise is not None:
                    here = (finding.error_x_noise, f"{cell.id} seed {problem.seed}")
                    WORST[precision, check] = max(WORST.get((precision, check), (0.0, "")), here)
                assert not finding.outcome.is_bad, (cell.id, problem.seed, finding)


@pytest.mark.parametrize("precision", ["16", "bf16", "bf16-true"])
def test_sums_that_are_mostly_exact_in_16_bits_accuse_nobody(simulation, cell_of, thorough, precision):
    """Short numbers round in one order of summation and not in another, and perhaps in no measured run."""
    cell = cell_of("linear-exact", "dp", "1x4", precision)
    for seed in range(60 if thorough else 5):
        problem = simulation.seeded(WORKLOADS["linear-exact"], seed)
        findings = simulation.judge(simulation.right_trace(problem, cell, seed), problem, cell)
        assert not any(finding.outcome.is_bad for finding in findings.values()), (seed, findings)


@pytest.mark.parametrize("precision", ["32", pytest.param("64", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("backend", "topology"), ONE_OF_EACH_BACKEND)
@pytest.mark.parametrize("workload", PLAIN)
def test_it_deviates_exactly_where_the_contract_is_not_one_device(
    simulation, cell_of, workload, backend, topology, precision
):
    cell = cell_of(workload, backend, topology, precision)
    found = simulation.judge(simulation.right_trace(WORKLOADS[workload], cell), WORKLOADS[workload], cell)
    expected = Outcome.DEVIATES if backend in COUPLED.get(workload, ()) else Outcome.PASSED
    assert (found["gradients"].outcome, found["training"].outcome) == (expected, expected)
    assert found["update"].outcome is Outcome.PASSED
