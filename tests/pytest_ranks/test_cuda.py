"""Marked tests on CUDA devices: nccl if there is a device per rank, and a message if CUDA was initialised before."""

from __future__ import annotations

import pytest

ALL_REDUCE = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.ranks({ranks})
def test_it(rank, world_size):
    assert dist.get_backend() == "nccl"
    assert torch.cuda.current_device() == rank
    values = torch.ones(2, device="cuda")
    dist.all_reduce(values)
    assert values.tolist() == [world_size] * 2


@pytest.mark.ranks({ranks}, backend="gloo")
def test_gloo():
    weights = torch.ones(2, requires_grad=True)
    weights.sum().backward()
    dist.all_reduce(weights.grad)
"""

STARTED = """
import pytest
import torch

torch.ones(1, device="cuda")


@pytest.mark.ranks(1)
def test_it():
    pass
"""


@pytest.mark.cuda(devices=1)
def test_one_rank_has_nccl(users):
    run = users(ALL_REDUCE.format(ranks=1))
    assert run.code == 0, run.stdout


@pytest.mark.cuda(devices=2)
def test_two_ranks_have_a_device_each(users):
    run = users(ALL_REDUCE.format(ranks=2))
    assert run.code == 0, run.stdout


@pytest.mark.cuda(devices=1)
def test_a_process_that_has_started_cuda_is_told_what_to_do(users):
    run = users(STARTED)
    assert run["test_it"].outcome == "failure"
    assert "this process has started CUDA" in run["test_it"].text
    assert "PYTORCH_NVML_BASED_CUDA_CHECK=1" in run["test_it"].text
