"""``ci/slurm_cluster.sh`` starts a real cluster, or several at a time, and stops it without a trace."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from plumbline.trainer.environments import SlurmEnvironment

SCRIPT = Path(__file__).parents[2] / "ci" / "slurm_cluster.sh"


def call(*words):
    return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, check=False, timeout=600)


def processes_that_name(folder):
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (place / "cmdline").read_bytes() + (place / "environ").read_bytes():
                found.append(place.name)
        except OSError:
            continue
    return found


def test_a_second_cluster_comes_and_goes_beside_the_first(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    assert call("up", folder, 2).returncode == 0
    try:
        assert f"{folder}/slurm.conf" in call("up", folder, 2).stdout, "it is up already, which is all right"
        assert re.findall("node[12] idle", call("status", folder).stdout) == ["node1 idle", "node2 idle"]
        left = subprocess.Popen(
            ["srun", "-N2", "--quiet", "sleep", "600"],
            env={"SLURM_CONF": f"{folder}/slurm.conf", "PATH": "/usr/bin:/bin"},
            stderr=subprocess.DEVNULL,
        )
    finally:
        assert call("down", folder).returncode == 0
    assert left.wait(timeout=600) != 0
    assert not folder.exists()
    assert not processes_that_name(folder)
    assert call("down", folder).returncode == 0, "twice is no harm"
    assert "no cluster" in call("status", folder).stderr
    assert cluster.idle(), "the other one did not notice"


def test_what_is_no_cluster_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    assert call("down", tmp_path).returncode == 4
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize(("words", "code"), [((), 4), (("up", "", "many"), 4), (("status", "/no/such/folder"), 1)])
def test_what_makes_no_sense_is_said_in_a_line(words, code):
    done = call(*words)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1


def test_the_trainer_knows_itself_as_slurm_started_it(cluster):
    """Uneven nodes, and tasks dealt out in turn: srun's environment counts."""
    say = ["sh", "-c", "env | grep ^SLURM | tr '\\n' ' '; echo"]
    told = cluster.ask("srun", "--quiet", "--nodes=2", "--ntasks=3", "--distribution=cyclic", *say)
    ranks = []
    for line in told.splitlines():
        variables = dict(word.split("=", 1) for word in line.split() if "=" in word)
        environment = SlurmEnvironment(variables)
        ranks.append((environment.rank(0, 2), environment.node_rank(), environment.local_rank()))
        assert environment.main_address() == "node1"
    assert sorted(ranks) == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
