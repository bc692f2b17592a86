"""``--launcher slurm``: ranks run where SLURM placed them, and cells end as on one machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from plumbline.core.errors import LaunchError, PlanError, SubjectError
from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, launch
from plumbline.launch.launchers import check_nodes, find_launcher
from plumbline.launch.launchers.slurm import nodes_of_job
from plumbline.results.run import read_run
from plumbline.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

ON_NODES = Path(__file__).parents[1] / "launch" / "subjects" / "on_nodes.py"


def findings_of(trace, cell):
    return {finding.check: finding for finding in judge(TraceAnalysis(trace, WORKLOADS[cell.workload], cell))}


def test_ranks_live_on_their_nodes_and_are_told_by_both_names(slurm_pool, cell_of, tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_THE_USER", "is left")
    pool = slurm_pool(ON_NODES)
    for nodes, gpus in ((2, 2), (1, 2), (2, 1)):
        folder = tmp_path / f"{nodes}x{gpus}"
        cell = cell_of("mlp", "ddp", f"{nodes}x{gpus}", subject="says-what-it-was-told")
        trace = launch(pool, cell, folder, Settings(600))
        assert trace.is_whole, (trace.exits, [rank.error for rank in trace.ranks])
        for rank in range(nodes * gpus):
            told = json.loads((folder / f"rank-{rank}.log").read_text().splitlines()[0])
            node, local = divmod(rank, gpus)
            assert told["RANK"] == told["SLURM_PROCID"] == str(rank)
            assert told["LOCAL_RANK"] == told["SLURM_LOCALID"] == str(local)
            assert told["GROUP_RANK"] == told["SLURM_NODEID"] == str(node)
            assert told["WORLD_SIZE"] == told["SLURM_NTASKS"] == str(nodes * gpus)
            assert told["SLURM_NNODES"] == str(nodes)
            assert told["SLURM_NODELIST"].split(",")[node] == told["SLURMD_NODENAME"]
            assert told["CUDA_VISIBLE_DEVICES"] == "0,1", "SLURM's own is left as it is"
            assert told["FROM_THE_USER"] == "is left"
            assert told["PLUMBLINE_TOKEN"] is None, "the launcher's secret is nobody's else"
        assert len({json.loads((folder / f"rank-{r}.log").read_text().splitlines()[0])["SLURMD_NODENAME"]
                    for r in range(nodes * gpus)}) == nodes  # fmt: skip


def test_a_rank_that_dies_is_named_and_the_next_cell_finds_its_nodes_ready(slurm_pool, cell_of, tmp_path):
    pool = slurm_pool(ON_NODES)
    cell = cell_of("mlp", "ddp", "2x2", subject="dies-on-the-second-node")
    found = findings_of(launch(pool, cell, tmp_path / "dies", Settings(600)), cell)["launch"]
    assert found.outcome.value == "crashed"
    assert found.rank == 2
    assert "killed by signal 9" in found.message
    cell = cell_of("mlp", "ddp", "2x2", subject="says-what-it-was-told")
    assert launch(pool, cell, tmp_path / "next", Settings(600)).is_whole


def test_a_node_whose_server_is_gone_is_named(slurm_pool, cell_of, tmp_path):
    pool = slurm_pool(ON_NODES)
    cell = cell_of("mlp", "ddp", "2x2", subject="takes-its-node-along")
    with pytest.raises(LaunchError, match=r"on node\d: it closed the connection"):
        launch(pool, cell, tmp_path, Settings(600))
    assert not pool.alive


def test_a_subject_that_is_not_there_is_refused_with_the_node(slurm_pool):
    with pytest.raises(SubjectError, match=r"--subject nowhere.py: on node\d: file nowhere.py not found"):
        _ = slurm_pool("nowhere.py").subjects


def test_an_interpreter_that_is_not_there_is_said_in_srun_s_words(slurm_pool):
    with pytest.raises(LaunchError, match="0 of 2 nodes connected"):
        _ = slurm_pool(ON_NODES, "/no/such/python").subjects


def test_without_a_job_it_says_how_to_get_one():
    with pytest.raises(PlanError, match="plumbline submit"):
        nodes_of_job({})
    with pytest.raises(PlanError, match="did you mean 'slurm'"):
        find_launcher("slrum")


def test_more_nodes_than_the_job_has_are_refused(allocation):
    launcher = find_launcher("slurm")
    check_nodes(2, launcher)
    with pytest.raises(PlanError, match="the job has 2: use --nodes 2"):
        check_nodes(3, launcher)


@pytest.fixture(scope="module")
def both(cluster, conformance, tmp_path_factory):
    """The same cells under both launchers: each run, and pytest's output."""
    asked = ["--nodes", "2", "--gpus", "2", "--workloads", "mlp,contrastive", "--precisions", "32"]
    asked += ["-k", "2x2", "--seed", "3"]
    runs = {}
    for launcher in ("local", "slurm"):
        folder = tmp_path_factory.mktemp(launcher)
        words = [*conformance, *asked, "--launcher", launcher, "--report-dir", str(folder)]
        done = cluster.job(*words) if launcher == "slurm" else subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        runs[launcher] = read_run(folder / "latest"), folder
    return runs


def test_a_2_by_2_run_has_the_same_cells_verdicts_and_tables_as_on_one_machine(both):
    (local, local_folder), (slurm, slurm_folder) = both["local"], both["slurm"]
    told = [{(r.coordinates, r.check): (r.outcome, r.cause) for r in run.results} for run in (local, slurm)]
    assert told[0] == told[1]
    assert {(cell.backend, cell.num_nodes, cell.gpus) for cell in slurm.header.planned} == {
        ("balanced", 2, 2),
        ("ddp", 2, 2),
        ("ddp2", 2, 2),
    }
    assert slurm.footer is not None
    assert slurm.header.options["launcher"] == "slurm"
    tables = [(folder / "latest" / "support.csv").read_text() for folder in (local_folder, slurm_folder)]
    heads = [[line.rsplit(",", 2)[0] for line in table.splitlines()] for table in tables]
    assert len(heads[0]) == len(heads[1])


def test_a_run_on_a_cluster_leaves_no_evidence_lying_about(both):
    _, folder = both["slurm"]
    assert [place.name for place in folder.iterdir() if place.name.startswith("plumbline-")] == []
