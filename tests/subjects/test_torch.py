"""torch's own trainers are one subject, declared by several files; each trains like one device."""

from __future__ import annotations

import pytest

from plumbline.core.backend import declared_for
from plumbline.core.errors import SubjectError
from plumbline.core.outcome import Outcome, worst
from plumbline.core.training_behavior import of_accelerator
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.subjects import torch_schedules
from plumbline.subjects.load import load

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

TWICE = """
from plumbline import subject

@subject(name="mine", backends=["none", "ddp"], capabilities=["clipping"])
def train(job): ...

@subject(name="mine", backends=["fsdp"], precisions=["bf16"])
def train_sharded(job): ...

@subject(name="other", backends=["ddp"])
def train_other(job): ...
"""


@pytest.mark.parametrize(
    ("workload", "backend", "topology", "precision"),
    [
        ("mlp", "fsdp", "1x3", "32"),
        ("overflow", "fsdp", "1x3", "16"),
        ("accumulation", "fsdp", "1x3", "32"),
        ("clipping-adamw", "fsdp", "1x3", "32"),
        ("checkpoint-elastic", "fsdp", "1x3", "32"),
        ("checkpoint-elastic", "hsdp", "1x4", "32"),
        ("checkpoint-elastic", "tp", "1x2", "32"),
        ("checkpoint-elastic", "fsdp+tp", "1x4", "32"),
        ("checkpoint-experts", "ep", "1x2", "32"),
        ("checkpoint-elastic", "pp", "1x3", "32"),
        ("mlp", "zero", "1x3", "32"),
        ("adamw", "zero", "2x1", "64"),
        ("several-optimizers", "zero", "1x3", "32"),
        ("checkpoint-elastic", "zero", "1x3", "32"),
        ("mlp", "pp", "1x2", "16"),
        ("transformer", "sp", "1x2", "32"),
        ("clipping", "hsdp+tp", "1x8", "32"),
    ],
)
def test_what_is_shared_out_trains_as_one_device_does(
    workload, backend, topology, precision, warm_pool, cell_of, tmp_path
):
    cell = cell_of(workload, backend, topology, precision, subject="torch")
    findings = examine(warm_pool("torch"), cell, tmp_path, Settings(600)).findings
    assert worst(finding.outcome for finding in findings) is Outcome.PASSED, findings


SCHEDULES = [f"torch-{name}" for name in torch_schedules.SCHEDULES]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_trains_as_one_device_does(schedule, warm_pool, cell_of, tmp_path):
    cell = cell_of("adamw", "pp", "1x2", "32", subject=schedule)
    findings = examine(warm_pool("torch-schedules"), cell, tmp_path, Settings(600)).findings
    assert worst(finding.outcome for finding in findings) is Outcome.PASSED, findings


def test_a_rank_has_several_stages_where_the_schedule_asks_for_them():
    declared = {one.name: one.behavior for one in load("torch-schedules")}
    assert list(declared) == SCHEDULES
    assert declared["torch-gpipe"].stages_per_rank == 1
    assert declared["torch-looped-bfs"].stages_per_rank == 2
    assert declared["torch-dualpipev"].max_stages == 4


def test_each_backend_says_for_itself_what_it_can_do():
    declared = load("torch")
    assert {one.name for one in declared} == {"torch"}
    ddp, dp, fsdp, zero = (declared_for("torch", backend, declared) for backend in ("ddp", "dp", "fsdp", "zero"))
    assert "sparse-gradients" in ddp.capabilities & zero.capabilities
    assert "sparse-gradients" not in fsdp.capabilities
    assert "checkpoint" in fsdp.capabilities
    assert of_accelerator(dp.precisions, "cuda")
    assert not of_accelerator(dp.precisions, "cpu"), "with several cpus DataParallel is one plain forward"


def test_a_file_may_declare_one_name_for_several_backends(tmp_path):
    file = tmp_path / "twice_declared.py"
    file.write_text(TWICE)
    assert [one.name for one in load(str(file))] == ["mine", "mine", "other"]
    assert [one.backends for one in load(f"{file}::mine")] == [("none", "ddp"), ("fsdp",)]
    with pytest.raises(SubjectError, match=r"it has mine, other$"):
        load(f"{file}::theirs")
