"""Right trainers, with real ranks: they pass, or deviate exactly where the backend's contract says so."""

from __future__ import annotations

import pytest

from harness.core.outcome import Outcome

PLAIN = ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens")

PLACES = [("none", "1x1"), ("ddp", "1x2"), ("ddp", "1x3"), ("ddp", "2x2")]
REPLICAS = [("dp", "1x2"), ("dp", "1x3"), ("ddp2", "2x2")]
PRECISIONS = ("64", "32", "16", "bf16")
PAIRWISE = [
    (workload, *place, PRECISIONS[(row + column) % len(PRECISIONS)])
    for row, workload in enumerate(PLAIN)
    for column, place in enumerate(PLACES)
]
"""Every workload in every place, and each of both in every precision: `pytest suites/` has all of the combinations."""

COUPLED = {"cnn-batchnorm": {"dp", "ddp", "ddp2"}, "contrastive": {"ddp", "ddp2"}, "lm-tokens": {"ddp", "ddp2"}}


def expected(workload, backend):
    """DESIGN section 3: where a right trainer is one device, and where it is its contract."""
    return Outcome.DEVIATES if backend in COUPLED.get(workload, ()) else Outcome.PASSED


@pytest.mark.parametrize(("workload", "backend", "topology", "precision"), PAIRWISE)
def test_distributed_data_parallel_by_hand(verdict, workload, backend, topology, precision):
    findings, outcome = verdict("torch", workload, backend, topology, precision, locator="torch")
    assert outcome is expected(workload, backend), findings


@pytest.mark.parametrize(("workload", "backend", "topology", "precision"), PAIRWISE)
def test_the_reference_trainer(verdict, workload, backend, topology, precision):
    findings, outcome = verdict("reference", workload, backend, topology, precision, locator="reference")
    assert outcome is expected(workload, backend), findings


@pytest.mark.parametrize("precision", ["32", "16"])
@pytest.mark.parametrize(("backend", "topology"), REPLICAS)
@pytest.mark.parametrize("workload", PLAIN)
def test_the_reference_trainers_replicas(verdict, workload, backend, topology, precision):
    findings, outcome = verdict("reference", workload, backend, topology, precision, locator="reference")
    assert outcome is expected(workload, backend), findings


@pytest.mark.parametrize(("backend", "topology"), REPLICAS)
@pytest.mark.parametrize("workload", PLAIN)
def test_replicas_by_hand(verdict, workload, backend, topology):
    findings, outcome = verdict("replicas", workload, backend, topology, "64")
    assert outcome is expected(workload, backend), findings


@pytest.mark.parametrize("subject", ["by-hand", "odd-buckets"])
@pytest.mark.parametrize("workload", PLAIN)
def test_another_way_to_average_is_not_flagged(verdict, workload, subject):
    findings, outcome = verdict(subject, workload, "ddp", "1x3")
    assert outcome is expected(workload, "ddp"), findings


@pytest.mark.parametrize("subject", ["all-negatives", "all-negatives-through-the-job"])
def test_negatives_of_all_ranks_are_what_one_device_sees(verdict, subject):
    findings, outcome = verdict(subject, "contrastive", "ddp", "1x2")
    assert outcome is Outcome.PASSED, findings


@pytest.mark.parametrize("subject", ["replicas-take-their-own-loss", "replicas-one-after-another"])
def test_the_mean_of_equal_replicas_losses_is_not_flagged(verdict, subject):
    findings, outcome = verdict(subject, "mlp", "dp", "1x2")
    assert outcome is Outcome.PASSED, findings


@pytest.mark.parametrize("workload", ["mlp", "linear-exact"])
def test_skipped_steps_while_the_scale_is_found_are_not_flagged(verdict, workload):
    findings, outcome = verdict("overflows", workload, "ddp", "1x2", "16")
    assert outcome is Outcome.PASSED, findings
    assert findings["skipped-steps"].outcome is Outcome.PASSED
