"""What ``--accelerator`` selects, and the message if this torch or this machine does not have it."""

from __future__ import annotations

import pytest
import torch

from plumbline.core.errors import PlanError
from plumbline.core.training_behavior import of_accelerator
from plumbline.devices.calls import started_types
from plumbline.devices.counting import _counted_apart
from plumbline.devices.types import backend_of
from plumbline.planning.devices import check_accelerator, resolve_accelerator
from plumbline.planning.plan import Matrix, check_devices


@pytest.fixture
def three_of(monkeypatch):
    def seen(name):
        monkeypatch.setattr(f"torch.{name}.device_count", lambda: 3)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device(name))
        monkeypatch.setattr("plumbline.devices.counting._counted_apart", _counted_apart.__wrapped__)

    return seen


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_auto_takes_the_accelerator_of_torch_and_its_devices(name, three_of):
    assert resolve_accelerator("auto") == ("cpu", 0)
    three_of(name)
    assert resolve_accelerator("auto") == resolve_accelerator(name) == (name, 3)
    assert resolve_accelerator("cpu") == ("cpu", 0)


def test_torch_before_2_6_has_no_accelerator_and_cuda_is_found_all_the_same(monkeypatch):
    monkeypatch.delattr(torch, "accelerator")
    assert resolve_accelerator("auto") == ("cpu", 0)
    assert started_types() == ()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_accelerator("auto") == ("cuda", 2)


def test_auto_leaves_a_type_of_which_there_is_one_device_at_most(three_of):
    three_of("mps")
    assert resolve_accelerator("auto") == ("cpu", 0)
    assert resolve_accelerator("mps") == ("mps", 3)


@pytest.mark.parametrize("asked", ["cuda", "xpu"])
def test_no_device_of_a_type_is_one_sentence(asked):
    with pytest.raises(
        PlanError, match=f"^--accelerator {asked}: this machine has no {asked.upper()} device; use --acc"
    ):
        resolve_accelerator(asked)


@pytest.mark.parametrize("asked", ["tpu", "npu", "nn", "accelerator", "cuda:0", ""])
def test_a_type_that_this_torch_does_not_have_is_one_sentence(asked):
    with pytest.raises(
        PlanError, match=f"^--accelerator {asked}: torch .* has no devices of this type; it has cpu, cuda, "
    ):
        resolve_accelerator(asked)


def test_a_cluster_may_have_devices_that_this_machine_does_not_have():
    for asked in ("auto", "cpu", "cuda", "npu"):
        check_accelerator(asked)
    with pytest.raises(PlanError, match="--accelerator gpu: unknown type of device; choose from auto, cpu, cuda, "):
        check_accelerator("gpu")


def test_what_is_declared_for_every_other_type_holds_where_no_key_says_otherwise():
    declared = {"cpu": ("64",), "*": ("32",)}
    assert [of_accelerator(declared, one) for one in ("cpu", "cuda", "npu")] == [("64",), ("32",), ("32",)]
    assert of_accelerator({"cuda": ("32",)}, "xpu") == ()


def test_ranks_communicate_over_the_backend_of_their_devices():
    assert [backend_of(one) for one in ("cpu", "cuda", "xpu", "npu")] == ["gloo", "nccl", "xccl", None]
    assert [backend_of(one, shared=True) for one in ("cpu", "cuda", "xpu")] == ["gloo", "gloo", "xccl"]
    with pytest.raises(
        PlanError, match="torch has no communication backend for NPU devices, so 2 of them cannot train"
    ):
        check_devices(Matrix(2, accelerator="npu"), 2, oversubscribe=False)
    check_devices(Matrix(1, accelerator="npu"), 1, oversubscribe=False)
