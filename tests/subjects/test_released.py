"""Released trainers have short names, train where they are installed, and say elsewhere what is missing."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from harness.core.errors import SubjectError
from harness.core.outcome import Outcome, worst
from harness.examine import examine
from harness.launch.settings import Settings
from harness.subjects.load import SHORT_NAMES, load
from harness.subjects.released import where_there_is_cuda

LIBRARIES = {
    "lightning": ("lightning", "pip install lightning"),
    "fabric": ("lightning", "pip install lightning"),
    "accelerate": ("accelerate", "pip install accelerate"),
    "transformers": ("transformers", "pip install 'transformers[torch]'"),
    "ignite": ("ignite", "pip install pytorch-ignite"),
}

each = pytest.mark.parametrize("name", LIBRARIES)


@each
def test_a_short_name_leads_to_a_file(name):
    assert importlib.util.find_spec(SHORT_NAMES[name]) is not None


@each
def test_without_its_library_it_names_the_command_that_installs_it(name, monkeypatch):
    library, command = LIBRARIES[name]
    for hidden in (library, "pytorch_lightning"):  # the older name of one of them would do as well
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.delitem(sys.modules, SHORT_NAMES[name], raising=False)
    with pytest.raises(SubjectError) as raised:
        load(name)
    assert f"run `{command}`" in str(raised.value)
    assert "python=" in str(raised.value)


def test_what_a_library_cannot_do_on_a_cpu_is_declared_where_there_is_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert where_there_is_cuda("16") == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert where_there_is_cuda("16") == ["16"]


@each
@pytest.mark.parametrize(("backend", "topology"), [("none", "1x1"), ("ddp", "1x2")])
def test_it_trains_what_one_device_trains(name, backend, topology, warm_pool, cell_of, tmp_path):
    library, command = LIBRARIES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: {command}")
    cell = cell_of("mlp", backend, topology, subject=name)
    findings = examine(warm_pool(name), cell, tmp_path, Settings(60)).findings
    assert worst(finding.outcome for finding in findings) is Outcome.PASSED, findings
