"""A user's options become a plan, or a message with a way out."""

from __future__ import annotations

import os

import pytest
import torch

from plumbline.trainer import MisconfigurationError, Trainer
from plumbline.trainer.connector import connect
from plumbline.trainer.precision_plugins import Autocast, Converted, MasterWeights, PrecisionPlugin
from plumbline.trainer.trainer import rank_devices

DEFAULTS = {
    "gpus": None,
    "num_nodes": 1,
    "distributed_backend": None,
    "accelerator": "auto",
    "precision": None,
    "use_amp": False,
    "amp_level": None,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "max_epochs": None,
    "max_steps": None,
    "val_check_interval": None,
    "checkpoint_every": None,
    "checkpoint_path": None,
    "seed": 0,
    "start_method": None,
    "variables": {},
    "present": ("cuda", 0),
    "oversubscribe": False,
}


def plan(**options):
    return connect(**{**DEFAULTS, **options})


@pytest.mark.parametrize(
    ("options", "backend", "processes_per_node", "devices_per_process"),
    [
        ({}, "none", 1, 1),
        ({"gpus": 1}, "none", 1, 1),
        ({"gpus": 4}, "dp", 1, 4),
        ({"gpus": 4, "distributed_backend": "dp"}, "dp", 1, 4),
        ({"gpus": 4, "distributed_backend": "ddp"}, "ddp", 4, 1),
        ({"gpus": 4, "distributed_backend": "ddp2"}, "ddp2", 1, 4),
        ({"gpus": "3", "distributed_backend": "ddp"}, "ddp", 1, 1),
    ],
)
def test_backends(options, backend, processes_per_node, devices_per_process):
    found = plan(**options)
    assert found.backend.name == backend
    assert (found.processes_per_node, found.devices_per_process) == (processes_per_node, devices_per_process)


@pytest.mark.parametrize("backend", [None, "dp"])
def test_several_nodes_are_trained_with_ddp(backend):
    nodes = {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.warns(UserWarning, match="'ddp' is used"):
        found = plan(gpus=2, num_nodes=4, distributed_backend=backend, variables=nodes)
    assert (found.backend.name, found.world_size) == ("ddp", 8)


@pytest.mark.parametrize(
    ("options", "member", "dtype"),
    [
        ({}, PrecisionPlugin, torch.float32),
        ({"precision": "32"}, PrecisionPlugin, torch.float32),
        ({"precision": 64}, Converted, torch.float64),
        ({"precision": 16}, Autocast, torch.float16),
        ({"precision": "bf16"}, Autocast, torch.bfloat16),
        ({"use_amp": True}, Autocast, torch.float16),
        ({"use_amp": True, "precision": "bf16"}, Autocast, torch.bfloat16),
        ({"use_amp": True, "amp_level": "O0"}, PrecisionPlugin, torch.float32),
        ({"use_amp": True, "amp_level": "O2"}, MasterWeights, torch.float16),
        ({"precision": "bf16", "amp_level": "O3"}, Converted, torch.bfloat16),
    ],
)
def test_precisions(options, member, dtype):
    found = plan(**options)
    assert (found.precision, found.dtype) == (member, dtype)


def test_accelerators():
    assert plan(gpus=2).accelerator == "cpu"
    assert plan(gpus=2, present=("cuda", 2)).accelerator == "cuda"
    assert plan(gpus=None, present=("cuda", 2)).accelerator == "cpu"
    assert plan(gpus=8, present=("cuda", 2), accelerator="cpu").accelerator == "cpu"
    assert plan(gpus=-1, present=("cuda", 2)).devices == (0, 1)
    assert len(plan(gpus=-1).devices) == os.cpu_count()


def test_other_types_of_device_have_ranks_and_no_replicas():
    npu = {"gpus": 2, "present": ("npu", 2), "accelerator": "npu"}
    ranks = plan(**npu, distributed_backend="ddp")
    assert (ranks.accelerator, ranks.start_method) == ("npu", "spawn")
    with pytest.raises(MisconfigurationError, match="splits batches over CUDA devices only, not over NPU devices"):
        plan(**npu, distributed_backend="dp")
    with pytest.raises(MisconfigurationError, match="needs NPU device 2, but there are 2"):
        plan(**{**npu, "gpus": 3}, distributed_backend="ddp")
    with pytest.raises(MisconfigurationError, match="accelerator='gpu'"):
        plan(accelerator="gpu")


def test_ranks_share_devices_in_turn_over_gloo_where_they_are_allowed_to():
    ddp = {"gpus": 4, "present": ("cuda", 3), "distributed_backend": "ddp"}
    with pytest.raises(MisconfigurationError, match="there are 3"):
        plan(**ddp)
    shared = plan(**ddp, oversubscribe=True)
    assert [rank_devices(shared, rank)[0] for rank in range(4)] == [torch.device("cuda", i) for i in (0, 1, 2, 0)]
    assert (shared.comm, shared.world_size) == ("gloo", 4)
    assert plan(**{**ddp, "gpus": 3}).comm == "nccl"
    assert plan(gpus=4, distributed_backend="ddp", oversubscribe=True).comm == "gloo"


@pytest.mark.parametrize(("gpus", "devices"), [(2, 1), (3, 2)])
def test_replicas_of_one_process_do_not_share_a_device(gpus, devices):
    for backend in ("dp", "ddp2"):
        with pytest.raises(MisconfigurationError, match="only ranks can share"):
            plan(gpus=gpus, present=("cuda", devices), distributed_backend=backend, oversubscribe=True)
        enough = plan(gpus=gpus, present=("cuda", gpus), distributed_backend=backend, oversubscribe=True)
        assert enough.devices_per_process


def test_ranks_are_forked_only_where_no_cuda_device_is():
    assert plan(gpus=2).start_method == "fork"
    assert plan(gpus=2, present=("cuda", 2)).start_method == "spawn"
    assert plan(gpus=2, present=("cuda", 2), accelerator="cpu").start_method == "spawn"
    assert plan(gpus=2, start_method="spawn").start_method == "spawn"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpus": "0,,1"}, "index|indices"),
        ({"gpus": [0, 0]}, "twice"),
        ({"gpus": -2}, "negative"),
        ({"gpus": True}, "bool"),
        ({"gpus": 1.5}, "float"),
        ({"gpus": 3, "present": ("cuda", 2)}, "there are 2.*accelerator='cpu'"),
        ({"gpus": "7", "present": ("cuda", 2)}, "device 7"),
        ({"gpus": 1, "accelerator": "cuda"}, "there are 0"),
        ({"gpus": 1, "accelerator": "cuda", "oversubscribe": True}, "no CUDA device to share"),
        ({"accelerator": "cuda", "present": ("cuda", 2)}, "has no device"),
        ({"accelerator": "gpu"}, "accelerator='gpu'"),
        ({"distributed_backend": "dpp"}, "did you mean 'd?dp'"),
        ({"distributed_backend": "DDP"}, "did you mean 'ddp'"),
        ({"distributed_backend": "horovod"}, "use None, 'dp', 'ddp', 'ddp2'"),
        ({"distributed_backend": 2}, "does not exist"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"num_nodes": True}, "num_nodes=True"),
        ({"num_nodes": 2, "distributed_backend": "ddp"}, "NODE_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"precision": 8}, "64, 32, 16 or 'bf16'"),
        ({"precision": True}, "precision=True"),
        ({"precision": "half"}, "precision='half'"),
        ({"use_amp": 1}, "use_amp=1"),
        ({"use_amp": True, "amp_level": "O4"}, "use None, 'O0', 'O1'"),
        ({"use_amp": True, "amp_level": "o1"}, "did you mean 'O1'"),
        ({"amp_level": "O1"}, "use_amp=False"),
        ({"amp_level": "O1", "precision": 32}, "contradicts precision=32"),
        ({"amp_level": "O0", "precision": 16}, "contradicts precision=16"),
        ({"amp_level": "O0", "precision": 64}, "contradicts precision=64"),
        ({"use_amp": True, "precision": 32}, "leave one of them out"),
        ({"use_amp": True, "precision": 64}, "leave one of them out"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches=0"),
        ({"accumulate_grad_batches": 1.5}, "accumulate_grad_batches=1.5"),
        ({"gradient_clip_val": -1}, "is not a norm"),
        ({"gradient_clip_val": float("nan")}, "is not a norm"),
        ({"gradient_clip_val": "1"}, "not a number"),
        ({"max_epochs": -1}, "max_epochs=-1"),
        ({"max_steps": 1.0}, "max_steps=1.0"),
        ({"val_check_interval": 0}, "val_check_interval=0"),
        ({"val_check_interval": 0.5}, "val_check_interval=0.5"),
        ({"checkpoint_every": 5}, "checkpoint_path"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": None}, "seed=None"),
        ({"start_method": "forkserver"}, "start_method='forkserver'"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(options, sentence):
    with pytest.raises(MisconfigurationError, match=sentence) as caught:
        plan(**options)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "variables", "name"),
    [
        ({"gpus": 2, "distributed_backend": "ddp"}, {"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"gpus": 2}, {"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({}, {"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        (
            {"gpus": 2, "distributed_backend": "ddp2"},
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "WORLD_SIZE=2",
        ),
    ],
)
def test_what_contradicts_torchrun(options, variables, name):
    with pytest.raises(MisconfigurationError, match=name):
        plan(**options, variables={"RANK": "0", "LOCAL_RANK": "0", **variables})


def test_what_contradicts_slurm():
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert plan(gpus=2, num_nodes=2, distributed_backend="ddp", variables=slurm).world_size == 4
    with pytest.raises(MisconfigurationError, match="SLURM_NNODES=2"):
        plan(gpus=4, num_nodes=1, distributed_backend="ddp", variables=slurm)


def test_the_trainer_takes_the_older_name_of_num_nodes(monkeypatch):
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Trainer(gpus=1, nb_gpu_nodes=3, distributed_backend="ddp", accelerator="cpu").plan.num_nodes == 3
    with pytest.raises(MisconfigurationError, match="nb_gpu_nodes=3"):
        Trainer(num_nodes=2, nb_gpu_nodes=3)
