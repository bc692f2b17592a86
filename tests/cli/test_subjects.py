"""``plumbline subjects``: built-in subjects, missing libraries, and environments that are complete or absent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import zipfile
from io import StringIO
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from plumbline.cli import documents
from plumbline.cli.main import main
from plumbline.cli.trainers import show
from plumbline.subjects.load import SHORT_NAMES, Shipped, load, shipped
from plumbline.subjects.virtual_environments import (
    LIBRARIES,
    InstallError,
    environments,
    install,
    parse_requirement,
    pip_command,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plumbline" / "envs"


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Return the only folder where pip looks for wheels: torch of this version, and some libraries.

    AIToolbox requires something that is missing.
    """
    folder = tmp_path / "shelf"
    folder.mkdir()
    here = parse_requirement("lightning==9.8").torch.partition("==")[2]
    versions = {"torch": here, "numpy": "9.0", "lightning": "9.8", "tqdm": "4.0", "aitoolbox": "1.8.0"}
    for name, version in versions.items():
        needs = "Requires-Dist: a-painter\n" if name == "aitoolbox" else ""
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", f"version = {version!r}")
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def listing(width=100):
    console = Console(file=StringIO(), width=width)
    show(shipped(), console)
    return console.file.getvalue()


def test_every_subject_that_ships_is_listed():
    said = listing()
    for name in SHORT_NAMES:
        assert f"\n {name} " in said
    (torch,) = [line for line in said.splitlines() if line.startswith(" torch ")]
    assert all(word in torch for word in ("none ddp", "64 32 16 bf16", "accumulation"))
    assert any("fsdp" in line and "accumulation" in line for line in said.splitlines()), "its backends differ"


def test_they_are_listed_for_programs(capsys):
    assert main(["subjects", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    schema = Path(documents.__file__).with_name("subjects.schema.json")
    Draft202012Validator(json.loads(schema.read_text())).validate(printed)
    found = {one["name"]: one for one in printed["subjects"]}
    assert found.keys() == SHORT_NAMES.keys()
    ddp = next(one for one in found["torch"]["declared"] if "ddp" in one["backends"])
    assert "bf16" in ddp["precisions"]["*"]
    assert "accumulation" in ddp["capabilities"]
    assert [one["library"] for one in found.values() if one["library"] is None] == [
        None for one in found.values() if not one["declared"] and one["obstacle"] is None
    ]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_the_terminal(width):
    console = Console(file=StringIO(), width=width)
    show([one for one in shipped() if one.declared], console)
    assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_what_is_missing_comes_with_the_command_that_installs_it():
    console = Console(file=StringIO(), width=80)
    show(
        [Shipped("transformers", None), Shipped("ignite", "pytorch-ignite 0.5", obstacle="ImportError: idist")],
        console,
    )
    said = console.file.getvalue()
    assert "not installed" in said
    assert "pip install 'transformers[torch]'" in said
    assert "plumbline subjects install transformers==VERSION" in said
    assert "ignite cannot be imported: ImportError: idist" in said


@pytest.mark.parametrize("name", sorted(name for name, library in LIBRARIES.items() if library != "torch"))
def test_the_library_is_the_one_that_the_adapter_names(name):
    source = Path(importlib.util.find_spec(SHORT_NAMES[name].module).origin).read_text()
    assert pip_command(name) in source


def test_a_library_that_needs_another_torch_gets_that():
    assert parse_requirement("composer==0.32.1").torch == "torch==2.7.0"


def test_an_environment_has_exactly_what_was_asked_for(shelf, cache, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["subjects", "install", "lightning==9.8"]) == 0
    python = parse_requirement("lightning==9.8").python
    assert f"plumbline run --subject 'lightning;python={python}'\n" in capsys.readouterr().out
    code = "import torch, numpy, lightning; print(lightning.version, torch.version)"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["9.8", parse_requirement("lightning==9.8").torch.partition("==")[2]]
    assert [folder.name for folder in cache.iterdir()] == [python.parent.parent.name]
    assert environments() == [(python.parent.parent.name, python)]
    assert f"python={python}" in listing()

    before = python.stat()
    for file in shelf.iterdir():
        file.unlink()
    assert install(parse_requirement("fabric==9.8")) == python  # the same library, which is installed
    assert python.stat() == before


def test_a_library_that_asks_for_too_much_comes_alone(shelf, cache):
    python = install(parse_requirement("aitoolbox==1.8.0"))
    code = "import torch, numpy, tqdm, aitoolbox; print(aitoolbox.version)"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["1.8.0"]


def test_nothing_is_left_of_what_cannot_be_installed(shelf, cache, capsys):
    assert main(["subjects", "install", "lightning==9.9"]) == 2
    said = capsys.readouterr().err
    assert "lightning==9.9 could not be installed in" in said
    assert "No matching distribution found for lightning==9.9" in said
    assert "pip index versions lightning" in said
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("lightnin==2.5", "unknown subject 'lightnin'"),
        ("reference==1.0", "comes with Plumbline"),
        ("lightning", "give a version, as in lightning==1.2.3"),
        ("transformers==>4", "`pip index versions transformers` lists them"),
    ],
)
def test_what_cannot_be_installed_is_said_before_anything_is_tried(what, said, cache):
    with pytest.raises(InstallError) as raised:
        parse_requirement(what)
    assert said in str(raised.value)
    assert not cache.exists()


def test_another_torch_is_a_subject_s_library_as_well():
    environment = parse_requirement("torch==2.9.1")
    assert environment.requirements == ["torch==2.9.1", "numpy"]
    assert environment.folder.name == "torch-2.9.1"
    assert parse_requirement("transformers==4.57.0").folder.name.startswith("transformers-4.57.0-torch-")


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InstallError, match="set XDG_CACHE_HOME to another folder"):
        install(parse_requirement("lightning==2.5.5"))


def test_every_short_name_that_is_installed_has_its_subject():
    for one in shipped():
        if one.declared:
            names = {found.name for found in load(one.name)}
            assert names == {one.name} or (one.name == "torch-schedules" and len(names) > 1)
