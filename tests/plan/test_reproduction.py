"""The command that repeats a cell plans that cell."""

from __future__ import annotations

import argparse
import shlex
from functools import cache
from pathlib import Path

import pytest

from plumbline.core.invocation import suites
from plumbline.planning.declaration import Declaration
from plumbline.planning.devices import DEFAULT_GPUS
from plumbline.planning.options import Reproduction
from plumbline.planning.plan import Matrix, plan
from plumbline.pytest_plugin.plugin import add_options
from plumbline.workloads import PERFORMANCE, WORKLOADS

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("suite")
add_options(OPTIONS.add_argument)
LOCATOR = "my trainer.py;python=/x/python"
PRECISIONS = {"cpu": ["32", "16"], "cuda": ["32"]}
DECLARED = [Declaration("mine", LOCATOR, ("none", "ddp", "ddp2"), PRECISIONS, frozenset({"accumulation"}))]


def options_of(*words):
    return vars(OPTIONS.parse_args(["suites/", *words]))


def matrix_of(options):
    names = ("backends", "precisions", "workloads")
    selected = {name: tuple(options[name].split(",")) if options[name] else None for name in names}
    return Matrix(gpus=options["gpus"] or DEFAULT_GPUS, nodes=options["nodes"], seed=options["seed"], **selected)


def planned_with(options, among=WORKLOADS):
    return planned_in(matrix_of(options), among is PERFORMANCE)


@cache
def planned_in(matrix, measured):
    return dict.fromkeys(plan(matrix, DECLARED, PERFORMANCE if measured else WORKLOADS))


def words_of(options, planned, suite="conformance"):
    return words_by(Reproduction(options, matrix_of(options)), planned, suite)


def words_by(reproduction, planned, suite):
    words = shlex.split(reproduction.command(planned, LOCATOR, suites() / suite))
    return words[words.index("--cell") :]


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "--gpus 2",
        "--gpus 8",
        "--gpus 6 --seed 3",
        "--nodes 4 --gpus 8",
        "--gpus 8 --backends fsdp,ddp --precisions 16",
    ],
)
@pytest.mark.parametrize("among", [WORKLOADS, PERFORMANCE], ids=["conformance", "performance"])
def test_every_cell_is_planned_by_its_command(asked, among):
    asked = options_of(*asked.split())
    reproduction = Reproduction(asked, matrix_of(asked))
    for planned in planned_with(asked, among):
        words = words_by(reproduction, planned, "performance" if among is PERFORMANCE else "conformance")
        options = options_of(*words)
        assert options["cell"] == [planned.cell.id]
        assert options["subject"] == [LOCATOR]
        assert planned in planned_with(options, among)
        assert options["precisions"] is options["workloads"] is None


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("--seed 0", "--seed 0"),
        ("--time-limit 60", "--time-limit 60"),
        ("--time-limit 120", ""),
        ("--time-limit 0.5", "--time-limit 0.5"),
        ("--accelerator cpu", "--accelerator cpu"),
        ("--accelerator auto", ""),
        ("--expectations elsewhere", "--expectations elsewhere"),
        ("--store-above 10", "--store-above 10"),
        ("--launches 9 --keep-traces --report-dir there --resume --precisions 32 --workloads mlp --gpus 2", "--gpus 2"),
        ("--subject another.py --cell another", ""),
        ("--oversubscribe", ""),
        ("--launcher torchrun --rendezvous n:1 --gpus 2", "--gpus 2 --rendezvous n:1 --launcher torchrun"),
    ],
)
def test_what_changes_the_cell_is_kept_and_nothing_else(asked, kept):
    asked = options_of(*asked.split())
    planned = next(iter(planned_with(asked)))
    assert words_of(asked, planned) == ["--cell", planned.cell.id, "--subject", LOCATOR, *kept.split()]


def test_launches_are_kept_where_they_are_measured():
    asked = options_of("--launches", "9")
    assert words_of(asked, next(iter(planned_with(asked, PERFORMANCE))), "performance")[-2:] == ["--launches", "9"]


def test_the_suite_is_named_as_it_is_reached_from_here(tmp_path, monkeypatch):
    asked = options_of()
    planned = next(iter(planned_with(asked)))

    def said(suite):
        reproduction = Reproduction(asked, matrix_of(asked))
        return reproduction.command(planned, LOCATOR, Path(suite)).partition(" --cell ")[0].rpartition("/bin/")[2]

    monkeypatch.chdir(suites().parent)
    assert said(suites() / "conformance") == "pytest suites/conformance"
    monkeypatch.chdir(tmp_path)
    assert said(suites() / "conformance") == "plumbline run"
    assert said(suites() / "performance") == "plumbline run performance"
    assert said(tmp_path / "suites" / "mine") == "pytest suites/mine"
