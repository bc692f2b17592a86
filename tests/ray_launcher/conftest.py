"""A Ray cluster of two raylets on this machine, for the tests in this folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

CLUSTER = Path(__file__).parents[2] / "ci" / "ray_cluster.py"


@pytest.fixture(scope="module")
def waiting_folder(tmp_path_factory):
    """The folder in which waiting ranks leave files; Ray's nodes have known it since they started."""
    return tmp_path_factory.mktemp("waiting")


@pytest.fixture(scope="module")
def cluster(program, waiting_folder):
    """Two nodes with four CPUs each; this process's environment refers to them."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    module = program(CLUSTER)
    made = module.RayCluster(2, 4, {"PLUMBLINE_TEST_FOLDER": str(waiting_folder)})
    with made, pytest.MonkeyPatch.context() as environment:
        for name, value in made.environment.items():
            environment.setenv(name, value)
        environment.setenv("PLUMBLINE_TEST_FOLDER", str(waiting_folder))
        yield made
    assert not made.processes
