"""Right trainers are found right on real devices: noise measured on the CPU explains their rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

WORKLOADS = ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens", "transformer", "random-masks")
pytestmark = pytest.mark.cuda

FUSED = Path(__file__).parents[1] / "worker" / "subjects" / "fused.py"


@pytest.mark.parametrize("subject", ["reference", "torch"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_one_device(cuda_cell, wrong, subject, workload):
    assert not wrong(subject, cuda_cell(subject, workload, "none", "1x1"))


@pytest.mark.parametrize("precision", ["64", "16", "bf16"])
@pytest.mark.parametrize("workload", ["mlp", "cnn-batchnorm"])
def test_one_device_in_other_precisions(cuda_cell, wrong, workload, precision):
    assert not wrong("torch", cuda_cell("torch", workload, "none", "1x1", precision))


@pytest.mark.parametrize(
    ("subject", "backend"), [("reference", "ddp"), ("torch", "ddp"), ("torch", "zero"), ("torch", "fsdp")]
)
@pytest.mark.parametrize("workload", ["mlp", "cnn-batchnorm"])
def test_ranks_that_share_a_device_over_gloo(cuda_cell, wrong, subject, backend, workload):
    assert not wrong(subject, cuda_cell(subject, workload, backend, "1x2"), oversubscribe=True)


@pytest.mark.cuda(devices=2)
@pytest.mark.parametrize(
    ("subject", "backend"),
    [
        ("reference", "dp"), ("torch", "dp"),
        ("reference", "ddp"), ("torch", "ddp"), ("torch", "zero"), ("torch", "fsdp"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("workload", ["mlp", "cnn-batchnorm", "random-masks"])
def test_two_devices(cuda_cell, wrong, subject, backend, workload):
    assert not wrong(subject, cuda_cell(subject, workload, backend, "1x2"))


@pytest.mark.cuda(devices=2)
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_two_devices_that_exchange_keys_and_values(cuda_cell, wrong, precision):
    assert not wrong("torch", cuda_cell("torch", "transformer", "cp", "1x2", precision))


@pytest.mark.cuda(devices=4)
@pytest.mark.parametrize("backend", ["ddp", "ddp2"])
def test_two_nodes_of_two_devices(cuda_cell, wrong, backend):
    assert not wrong("reference", cuda_cell("reference", "cnn-batchnorm", backend, "2x2"))


@pytest.mark.parametrize("workload", ["mlp", "overflow"])
def test_an_optimizer_that_unscales_in_its_kernel(cuda_cell, wrong, workload):
    assert not wrong(FUSED, cuda_cell("fused", workload, "none", "1x1", "16"))


def test_a_checkpoint_is_gone_on_from(cuda_cell, wrong):
    assert not wrong("reference", cuda_cell("reference", "checkpoint", "none", "1x1", "16"))
