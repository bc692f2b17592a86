"""``--workload`` finds what it names, or a message lists what exists instead."""

from __future__ import annotations

import shutil

import pytest

from plumbline.cli.main import main
from plumbline.core.cell import Cell
from plumbline.core.errors import WorkloadError
from plumbline.core.topology import Topology
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import use_workloads, workload_of
from plumbline.workloads import WORKLOADS

SECOND = "\n\nclass Second(Mine):\n    name = 'second'\n"


def test_a_file_puts_up_what_it_defines(written):
    file = written()
    file.write_text(file.read_text() + SECOND)
    assert [own.name for own in use_workloads([str(file)])] == ["mine", "second"]
    assert [own.name for own in use_workloads([f"{file}::second"])] == ["second"]
    assert "mine" not in WORKLOADS, "what was used before is forgotten"


def test_a_module_is_found_in_the_present_folder(written, monkeypatch, tmp_path):
    (tmp_path / "problems").mkdir()
    shutil.move(written(), tmp_path / "problems" / "first.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (own,) = use_workloads(["problems.first"])
    assert (own.name, own.locator) == ("mine", "problems.first")


def test_any_process_finds_it_by_its_cell(written, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    written()
    use_workloads(["mine.py"])
    cell = Cell("torch", "mine", "ddp", Topology(1, 2), "32", "cpu", 7, WORKLOADS["mine"].locator)
    del WORKLOADS["mine"]
    monkeypatch.chdir("/")
    assert (workload_of(cell).name, workload_of(cell).seed) == ("mine", 7)


def test_a_file_that_registers_its_workload_by_itself_is_taken_too(written):
    file = written()
    file.write_text(f"{file.read_text()}\n\nfrom plumbline.workloads import register\nregister(Mine())\n")
    assert [own.name for own in use_workloads([str(file)])] == ["mine"]


def test_the_hash_is_that_of_the_file_and_of_what_it_imports_from_beside_it(written, tmp_path):
    (tmp_path / "beside_mine.py").write_text("WIDTH = 5\n\n\ndef width():\n    return WIDTH\n")
    file = written(changes=[("import torch\n", "import torch\nfrom beside_mine import width\n")])
    (before,) = use_workloads([str(file)])
    (same,) = use_workloads([str(file)])
    assert same == before
    (tmp_path / "beside_mine.py").write_text("WIDTH = 6\n\n\ndef width():\n    return 5\n")
    (after,) = use_workloads([str(file)])
    assert after.sha256 != before.sha256


def test_the_models_of_a_file_in_the_path_are_unpickled_by_its_name(written, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    use_workloads([str(written("my_own.py"))])
    assert type(WORKLOADS["mine"].model()).__module__ == "my_own"
    use_workloads([str(written("statistics.py"))])
    assert type(WORKLOADS["mine"].model()).__module__ == "workload_statistics", "a library keeps its name"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "file {file} not found"),
        ("x = 1\n", "has no workload: define a subclass of plumbline.workloads.Workload"),
        ("import no_such_library\n", "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
        ("def f(:\n", "cannot be imported: SyntaxError"),
        ("import sys\nsys.exit(3)\n", "cannot be imported: SystemExit: 3"),
        (
            "from plumbline.workloads import Workload\n\n\nclass Mlp(Workload):\n    name = 'mlp'\n",
            "'mlp' is already the name of a built-in workload; choose another name",
        ),
        (
            "from plumbline.workloads import Workload\n\n\nclass A(Workload):\n    name = 'a/b'\n",
            "A.name is 'a/b': use only letters, digits and . _ + -",
        ),
        (
            "from plumbline.workloads import Workload\n\n\nclass A(Workload):\n    name = 'a'\n\n"
            "    def __init__(self, width):\n        self.width = width\n",
            "A() raises TypeError",
        ),
        (
            "from plumbline.workloads import PerformanceWorkload\n\n\nclass A(PerformanceWorkload):\n    name = 'a'\n",
            "A is a PerformanceWorkload: --workload does not support timed workloads",
        ),
    ],
)
def test_what_is_no_workload_is_a_sentence(text, said, tmp_path):
    file = tmp_path / "theirs.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(WorkloadError) as raised:
        use_workloads([str(file)])
    assert str(raised.value).startswith(f"--workload {file}: ")
    assert said.format(file=file) in str(raised.value)


def test_a_name_that_the_file_does_not_have_and_one_that_two_files_have(written):
    file = written()
    with pytest.raises(WorkloadError, match=r"has no workload 'yours'; it has mine"):
        use_workloads([f"{file}::yours"])
    other = written("other.py")
    with pytest.raises(WorkloadError, match=rf"{file}; choose another name"):
        use_workloads([str(file), str(other)])


def test_new_workload_writes_one_that_is_fit(tmp_path, capsys):
    file = tmp_path / "our problem.py"
    assert main(["new-workload", str(file)]) == 0
    assert f"--workload '{file}'" in capsys.readouterr().out
    (own,) = use_workloads([str(file)])
    assert own.name == "our-problem"
    refuse_unfit(WORKLOADS[own.name], (1, 2, 3, 4, 8))
    assert main(["new-workload", str(file)]) == 2
    assert "already exists; choose another name" in capsys.readouterr().err
