"""Right trainers, with real ranks: they pass, or deviate exactly where the backend's contract says so.

One cell for each workload and each place: the conformance suite has all combinations, and ``suites/detection`` has
trainers that are right in other ways.
"""

from __future__ import annotations

import pytest

from plumbline.core.outcome import Outcome

CELLS = [
    ("linear-exact", "none", "1x1", "64", Outcome.PASSED),
    ("mlp", "ddp", "1x2", "32", Outcome.PASSED),
    ("cnn-batchnorm", "ddp", "1x3", "16", Outcome.DEVIATES),
    ("contrastive", "ddp", "2x2", "bf16", Outcome.DEVIATES),
    ("lm-tokens", "none", "1x1", "16", Outcome.PASSED),
]
REPLICAS = [
    ("contrastive", "dp", "1x2", "32", Outcome.PASSED),
    ("cnn-batchnorm", "dp", "1x3", "32", Outcome.DEVIATES),
    ("lm-tokens", "ddp2", "2x2", "16", Outcome.DEVIATES),
]


@pytest.mark.parametrize(("workload", "backend", "topology", "precision", "expected"), CELLS)
def test_distributed_data_parallel_by_hand(verdict, workload, backend, topology, precision, expected):
    findings, outcome = verdict("torch", workload, backend, topology, precision, locator="torch")
    assert outcome is expected, findings


@pytest.mark.parametrize(("workload", "backend", "topology", "precision", "expected"), CELLS + REPLICAS)
def test_the_reference_trainer(verdict, workload, backend, topology, precision, expected):
    findings, outcome = verdict("reference", workload, backend, topology, precision, locator="reference")
    assert outcome is expected, findings


def test_skipped_steps_while_the_scale_is_found_are_not_flagged(verdict):
    findings, outcome = verdict("first-steps-skipped", "mlp", "ddp", "1x2", "16")
    assert outcome is Outcome.PASSED, findings
    assert findings["skipped-steps"].outcome is Outcome.PASSED
