"""Memory is a rank's own peak, and tensors are counted as by hand."""

from __future__ import annotations

import platform
import subprocess
import sys

import psutil
import pytest
import torch

from plumbline.workloads import PERFORMANCE

MIB = 1 << 20


def peaks(told):
    return [rank.memory["memory_private_peak"] for rank in told.ranks]


@pytest.fixture(scope="module")
def torch_in_memory():
    """The resident memory of this process, which has loaded torch: forked ranks share it."""
    assert torch.ones(1).item() == 1
    return psutil.Process().memory_info().rss


def test_what_a_rank_used_for_a_moment_is_in_its_peak(timed):
    (plain,), (hoard,) = peaks(timed("plain")), peaks(timed("hoards"))
    assert 90 * MIB < hoard - plain < 106 * MIB


def faults_of(times, *, keeping):
    """Return the page faults of a process that repeatedly takes and frees a few megabytes."""
    program = f"""
import resource
from plumbline.devices.freed_memory import keep_freed_memory
if {keeping}:
    keep_freed_memory()
for _ in range({times}):
    blocks = [b"x" * (3 << 20) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another allocator")
def test_what_a_step_frees_the_next_one_has_without_asking_for_it():
    step = (faults_of(30, keeping=True) - faults_of(10, keeping=True)) / 20
    assert step < 100, "a step's 12 MiB are 3 000 pages"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another allocator")
def test_kept_memory_can_be_returned():
    program = """
import psutil
from plumbline.devices.freed_memory import keep_freed_memory, return_freed_memory
keep_freed_memory()
blocks = [b"x" * (16 << 20) for _ in range(8)]
del blocks
kept = psutil.Process().memory_info().rss
return_freed_memory()
print(kept - psutil.Process().memory_info().rss)
"""
    returned = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert int(returned) > 100 * MIB


def test_ranks_do_not_count_what_they_share(timed, torch_in_memory):
    together = peaks(timed("plain", "1x3"))
    assert len(together) == 3
    assert sum(together) < torch_in_memory
    assert min(together) > MIB


def test_a_ranks_own_memory_does_not_depend_on_how_many_share_the_rest(timed):
    two, four = peaks(timed("plain", "1x2")), peaks(timed("plain", "1x4"))
    assert max(two) / min(four) < 1.5


@pytest.mark.parametrize("workload", ["perf-mlp", "perf-resnet", "perf-gpt"])
def test_parameters_gradients_and_state_are_those_of_the_model(timed, workload):
    problem = PERFORMANCE[workload]
    model = problem.model()
    optimizer = problem.optimizer(model.parameters())
    batch = problem.dataset(1).batch(range(problem.global_batch_size(1)))
    problem.loss(model(batch), batch).backward()
    optimizer.step()
    own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    for rank in timed("plain", "1x2", workload).ranks:
        assert rank.tensors["tensors_parameters"] == own
        assert rank.tensors["tensors_gradients"] == own
        assert rank.tensors["tensors_optimizer"] == sum(value.numel() * value.element_size() for value in state)


def test_activations_are_what_one_counts_by_hand(timed):
    batch, width, classes = 4, 256, 8
    hidden, logits, weight = batch * width, batch * classes, 1  # after the ReLU; log-probabilities; their total weight
    (rank,) = timed("plain").ranks
    assert rank.tensors["tensors_activations"] == 4 * (hidden + logits + weight)


def test_activations_grow_with_the_batch_and_weights_do_not(timed):
    (small,) = timed("plain", "1x1", "perf-resnet").ranks
    # The strong variant has its whole batch on the single device.
    (same,) = timed("plain", "1x1", "perf-resnet-strong").ranks
    batches = [PERFORMANCE[name].global_batch_size(1) for name in ("perf-resnet", "perf-resnet-strong")]
    assert small.tensors["tensors_parameters"] == same.tensors["tensors_parameters"]
    ratio = same.tensors["tensors_activations"] / small.tensors["tensors_activations"]
    assert ratio == pytest.approx(batches[1] / batches[0], rel=0.01)


def test_communication_is_a_share_where_there_is_any(timed):
    assert timed("plain").ranks[0].communication is None
    for rank in timed("plain", "1x2", "perf-gpt").ranks:
        assert 0 < rank.communication <= 1
