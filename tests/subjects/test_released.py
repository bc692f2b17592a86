"""Released trainers have short names, train where they are installed, and otherwise name what is missing."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from plumbline.core.errors import SubjectError
from plumbline.core.outcome import Outcome, worst
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.subjects.load import SHORT_NAMES, load

LIBRARIES = {
    "lightning": ("lightning", "pip install lightning"),
    "fabric": ("lightning", "pip install lightning"),
    "accelerate": ("accelerate", "pip install accelerate"),
    "transformers": ("transformers", "pip install 'transformers[torch]'"),
    "ignite": ("ignite", "pip install pytorch-ignite"),
    "trl": ("trl", "pip install trl"),
    "trl-padding-free": ("trl", "pip install trl"),
    "sentence-transformers": ("sentence_transformers", "pip install 'sentence-transformers[train]'"),
    "sentence-transformers-gather": ("sentence_transformers", "pip install 'sentence-transformers[train]'"),
    "peft": ("peft", "pip install peft"),
    "torchtitan": ("torchtitan", "pip install torchtitan"),
    "composer": ("composer", "pip install mosaicml"),
    "ray": ("ray", "pip install 'ray[train]'"),
    "deepspeed": ("deepspeed", "pip install deepspeed"),
    "aitoolbox": ("aitoolbox", "pip install tqdm && pip install aitoolbox --no-deps"),
}

each = pytest.mark.parametrize("name", LIBRARIES)


@each
def test_a_short_name_leads_to_a_file(name):
    assert importlib.util.find_spec(SHORT_NAMES[name].module) is not None


@each
def test_without_its_library_it_names_the_command_that_installs_it(name, monkeypatch):
    library, command = LIBRARIES[name]
    for hidden in (library, "pytorch_lightning"):  # one of them also has an older name
        for imported in [name for name in sys.modules if name.startswith(f"{hidden}.")]:
            monkeypatch.delitem(sys.modules, imported)
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.delitem(sys.modules, SHORT_NAMES[name].module, raising=False)
    with pytest.raises(SubjectError) as raised:
        load(name)
    assert f"run `{command}`" in str(raised.value)
    assert "python=" in str(raised.value)


@each
@pytest.mark.parametrize(("backend", "topology"), [("none", "1x1"), ("ddp", "1x2")])
def test_it_trains_what_one_device_trains(name, backend, topology, warm_pool, cell_of, tmp_path):
    workload = {"trl": "lm-tokens", "trl-padding-free": "lm-tokens", "peft": "adapter"}.get(name, "mlp")
    trains_as_one_device(name, cell_of(workload, backend, topology, subject=name), warm_pool, tmp_path)


def test_a_loss_that_gathers_is_that_of_one_device(warm_pool, cell_of, tmp_path):
    name = "sentence-transformers-gather"
    trains_as_one_device(name, cell_of("contrastive", "ddp", "1x2", subject=name), warm_pool, tmp_path)


def test_fabric_trains_in_shards(warm_pool, cell_of, tmp_path):
    trains_as_one_device("fabric", cell_of("mlp", "fsdp", "1x2", subject="fabric"), warm_pool, tmp_path)


def test_peft_trains_in_shards(warm_pool, cell_of, tmp_path):
    trains_as_one_device("peft", cell_of("adapter", "fsdp", "1x2", subject="peft"), warm_pool, tmp_path)


def test_torchtitan_trains_in_shards(warm_pool, cell_of, tmp_path):
    trains_as_one_device("torchtitan", cell_of("mlp", "fsdp", "1x2", subject="torchtitan"), warm_pool, tmp_path)


@pytest.mark.parametrize("backend", ["zero", "zero2", "fsdp"])
def test_deepspeed_trains_in_flat_shards(backend, warm_pool, cell_of, tmp_path):
    trains_as_one_device("deepspeed", cell_of("mlp", backend, "1x2", subject="deepspeed"), warm_pool, tmp_path)


def trains_as_one_device(name, cell, warm_pool, tmp_path):
    library, command = LIBRARIES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: {command}")
    findings = examine(warm_pool(name), cell, tmp_path, Settings(600)).findings
    assert worst(finding.outcome for finding in findings) is Outcome.PASSED, findings
