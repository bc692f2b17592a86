"""The batch script has what was requested, is valid for bash with any contents, and refuses what it cannot express."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plumbline.core.errors import PlanError
from plumbline.slurm.scheduler import BatchScript
from plumbline.submit.engine import pairs, split_cells, variables
from plumbline.submit.engines.slurm import SlurmEngine
from plumbline.submit.submission import SubmitRequest

WORDS = st.text(st.characters(codec="ascii", min_codepoint=32), max_size=12)


@settings(max_examples=30, deadline=None)
@given(WORDS, WORDS.filter(lambda text: text.strip("./")))
def test_values_reach_the_command_as_they_are(value, folder):
    batch = BatchScript(
        {"nodes": 2}, 'printf "%s|%s" "$WORD" "$CUDA_VISIBLE_DEVICES"', "/", environment={"WORD": value}
    )
    done = subprocess.run(
        ["bash"], input=batch.text(), capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": "3,1"}
    )
    assert done.stdout == f"{value}|3,1"
    assert (
        subprocess.run(["bash", "-n"], input=BatchScript({}, "true", folder).text(), text=True, check=False).returncode
        == 0
    )


def test_options_stand_as_sbatch_reads_them():
    options = {"nodes": 12, "exclusive": None, "comment": "two words"}
    lines = BatchScript(options, "true", "/", comments={"nodes": "a dozen"}).text().splitlines()
    assert lines[1:5] == ["# a dozen", "#SBATCH --nodes=12", "#SBATCH --exclusive", '#SBATCH --comment="two words"']


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({"--mem": 0}, {}, "no option '--mem'"),
        ({"mem": '1"\n#SBATCH --uid=0'}, {}, "cannot be"),
        ({}, {"a b": "1"}, "not a valid name for an environment variable"),
    ],
)
def test_what_cannot_be_written_down_is_refused(options, environment, said):
    with pytest.raises(PlanError, match=said):
        BatchScript(options, "true", "/", environment=environment)


def test_modules_are_loaded_by_the_cluster_s_own_function():
    script = (
        'module() { echo "$@"; }; export -f module\n' + BatchScript({}, "true", "/", modules=("NCCL/2.4.7",)).text()
    )
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "load NCCL/2.4.7\n"


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=50), st.integers(1, 60))
def test_cells_are_dealt_out_evenly_and_each_once(cells, tasks):
    dealt = split_cells(cells, tasks)
    assert sorted(cell for share in dealt for cell in share) == sorted(cells)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert len(dealt) == min(tasks, len(cells))


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"gpus": 0}, {"tasks": 0}])
def test_nothing_cannot_be_asked_for(wrong):
    with pytest.raises(PlanError, match="at least 1"):
        SubmitRequest(**{"engine": SlurmEngine(), "nodes": 1, "gpus": 1, **wrong})


def test_a_variable_has_the_value_that_is_given_or_the_one_of_here(monkeypatch):
    monkeypatch.setenv("HERE", "a secret")
    assert variables(["HERE", "EMPTY=", "TWO=a=b"]) == {"HERE": "a secret", "EMPTY": "", "TWO": "a=b"}
    with pytest.raises(PlanError, match="--env NOWHERE: this variable is not set"):
        variables(["NOWHERE"])
    with pytest.raises(PlanError, match="should look like NAME=VALUE"):
        pairs("--slurm", ["mem"])
