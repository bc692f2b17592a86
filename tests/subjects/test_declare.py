"""A subject's declarations: precisions that may depend on the device, and the library under test."""

from __future__ import annotations

import platform

import pytest
import torch

from plumbline.core.errors import SubjectError
from plumbline.subjects.declare import subject


def declaration(**said):
    @subject(name="mine", backends=["none"], **said)
    def train(job):
        pass

    return train.__plumbline_subject__.declaration()


def test_precisions_hold_for_every_accelerator_unless_they_are_told_apart():
    assert declaration(precisions=["64", "32"])["precisions"] == {"*": ("64", "32")}
    assert declaration(precisions={"npu": ["32"], "*": ["64"]})["precisions"] == {"npu": ("32",), "*": ("64",)}
    assert declaration(precisions={"cuda": ["32", "16"]})["precisions"] == {"cuda": ("32", "16")}


@pytest.mark.parametrize(
    ("precisions", "said"),
    [
        ({"tpu": ["32"]}, "unknown accelerator 'tpu'; choose from cpu, cuda"),
        ({"cpu": ["32"], "cuda": ["fp16"]}, "unknown precision 'fp16'"),
    ],
)
def test_what_there_is_not_cannot_be_declared(precisions, said):
    with pytest.raises(SubjectError, match=said):
        declaration(precisions=precisions)


def test_it_says_which_version_of_its_library_is_there():
    python = platform.python_version()
    here = {"torch": torch.__version__, "python": python}
    assert declaration(library="torch")["software"] == {"library": "torch", "version": torch.__version__, **here}
    assert declaration(library="not-here")["software"] == {"library": "not-here", "version": None, **here}
    assert declaration()["software"] == {"library": None, "version": None, **here}


def test_how_it_trains_is_declared_where_it_differs():
    assert declaration()["conduct"] == {}
    said = {"shuffle": "never", "buffers": "per-rank", "loss": "labels", "max_nodes": 1}
    assert declaration(**said)["conduct"] == said
    assert declaration(data="iterations")["conduct"] == {"data": "iterations"}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"data": "steps"}, "unknown data='steps'; choose from epochs, iterations"),
        ({"shuffle": True}, "unknown shuffle=True; choose from job, always, never"),
        ({"buffers": "none"}, "unknown buffers='none'; choose from shared, per-rank"),
        ({"loss": "tokens"}, "unknown loss='tokens'; choose from job, labels"),
        ({"max_nodes": 0}, "max_nodes=0 is not a number of nodes"),
        ({"stages_per_rank": None}, "stages_per_rank=None is not a number of stages"),
        ({"max_stages": True}, "max_stages=True is not a number of stages"),
        ({"data": "iterations", "shuffle": "never"}, "has no epochs to shuffle"),
    ],
)
def test_a_way_of_training_that_there_is_not_is_refused(said, why):
    with pytest.raises(SubjectError, match=f"subject 'mine': .*{why}"):
        declaration(**said)


def test_the_parent_learns_it_from_the_interpreter_that_trains(warm_pool):
    declared = warm_pool("torch").subjects[0]
    assert declared["software"]["version"] == torch.__version__


def test_it_is_called_once_a_rank_unless_it_says_once_a_node():
    assert declaration()["launch"] == "rank"
    assert declaration(launch="node")["launch"] == "node"
    with pytest.raises(SubjectError, match="unknown launch 'process'; choose from rank, node"):
        declaration(launch="process")
