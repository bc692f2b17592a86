"""A process's rank and world under each launcher."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from plumbline.trainer import MisconfigurationError, PlainEnvironment, SlurmEnvironment, TorchrunEnvironment
from plumbline.trainer.environments import check_rendezvous, detect_environment, first_host, free_port, tasks_per_node

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "123456",
    "SLURM_NODELIST": "node[07-08]",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node[1-3,7]", "node1"),
        ("n[001-003]", "n001"),
        ("n[7,08-11]", "n7"),
        ("a[1-2],b3", "a1"),
        ("b3,a[1-2]", "b3"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("gpu-a[1,3]-ib.x,h", "gpu-a1-ib.x"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "a[1-2", "a[1-]", "a]", "a,,b", "a[]", "a[b-c]"])
def test_malformed_host_lists_are_refused(nodes):
    with pytest.raises(MisconfigurationError, match="malformed"):
        first_host(nodes)


def test_torchrun():
    environment = detect_environment({**TORCHRUN, "MASTER_ADDR": "head", "MASTER_PORT": "29500", **SLURM})
    assert isinstance(environment, TorchrunEnvironment)
    assert (environment.rank(1, 2), environment.local_rank(), environment.node_rank()) == (3, 1, 1)
    assert (environment.main_address(), environment.main_port()) == ("head", 29500)
    environment.check(num_nodes=2, processes_per_node=2)
    for topology in ((1, 2), (1, 4), (4, 1)):
        with pytest.raises(MisconfigurationError, match="WORLD_SIZE"):
            environment.check(*topology)


def test_torchrun_is_known_by_its_run_id_too():
    assert isinstance(detect_environment({"TORCHELASTIC_RUN_ID": "x"}), TorchrunEnvironment)


def test_slurm():
    environment = detect_environment(SLURM)
    assert isinstance(environment, SlurmEnvironment)
    assert (environment.rank(0, 2), environment.local_rank(), environment.node_rank()) == (2, 0, 1)
    assert environment.main_address() == "node07"
    assert environment.main_port() == SlurmEnvironment(dict(SLURM)).main_port() in range(1024, 32768)
    assert SlurmEnvironment({**SLURM, "MASTER_PORT": "4711"}).main_port() == 4711
    others = {k: v for k, v in SLURM.items() if k != "SLURM_NODELIST"} | {"SLURM_JOB_NODELIST": "b3,a1"}
    assert SlurmEnvironment(others).main_address() == "b3"
    environment.check(num_nodes=2, processes_per_node=2)
    with pytest.raises(MisconfigurationError, match="SLURM_NNODES=2"):
        environment.check(num_nodes=1, processes_per_node=4)
    with pytest.raises(MisconfigurationError, match="SLURM_NTASKS=4"):
        environment.check(num_nodes=2, processes_per_node=1)


def test_a_shell_of_slurm_is_no_task():
    assert isinstance(detect_environment({**SLURM, "SLURM_JOB_NAME": "bash"}), PlainEnvironment)


def test_plain_on_one_node_ignores_what_is_left_over():
    environment = PlainEnvironment({"MASTER_ADDR": "gone", "MASTER_PORT": "1", "NODE_RANK": "3"})
    environment.check(num_nodes=1, processes_per_node=2)
    assert (environment.node_rank(), environment.main_address()) == (0, "127.0.0.1")
    assert environment.main_port() > 1023


def test_plain_on_several_nodes_needs_to_be_told():
    several = {"NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    environment = PlainEnvironment(several)
    environment.check(num_nodes=2, processes_per_node=3)
    assert [environment.rank(local, 3) for local in range(3)] == [3, 4, 5]
    for missing in several:
        with pytest.raises(MisconfigurationError, match=missing):
            PlainEnvironment({k: v for k, v in several.items() if k != missing}).check(2, 3)
    with pytest.raises(MisconfigurationError, match="NODE_RANK=2"):
        PlainEnvironment({**several, "NODE_RANK": "2"}).check(2, 3)


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5"])
def test_a_variable_that_is_no_number_is_refused(value):
    with pytest.raises(MisconfigurationError, match="LOCAL_RANK"):
        TorchrunEnvironment({**TORCHRUN, "LOCAL_RANK": value}).local_rank()


def test_reading_changes_nothing():
    variables = dict(itertools.chain(SLURM.items(), TORCHRUN.items()))
    before = dict(variables)
    detect_environment(variables).check(2, 2)
    assert variables == before


@pytest.mark.parametrize(("text", "tasks"), [("2", {2}), ("8,4", {8, 4}), ("2(x3),1", {1, 2}), ("2(x3),2", {2})])
def test_tasks_per_node(text, tasks):
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "2(x", "2(x3", "x", "2,,1"])
def test_malformed_tasks_per_node_are_refused(text):
    with pytest.raises(MisconfigurationError, match="malformed"):
        tasks_per_node(text)


def test_nodes_of_unequal_size_have_their_own_ranks_and_contradict_equal_gpus():
    last = {"RANK": "11", "LOCAL_RANK": "3", "GROUP_RANK": "1", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4"}
    environment = detect_environment({**last, "GROUP_WORLD_SIZE": "2"})
    assert (environment.rank(3, 4), environment.local_rank(), environment.node_rank()) == (11, 3, 1)
    for gpus in (4, 8):
        with pytest.raises(MisconfigurationError, match="WORLD_SIZE"):
            environment.check(num_nodes=2, processes_per_node=gpus)
    slurm = {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NTASKS": "12", "SLURM_NNODES": "2"}
    environment = detect_environment({**slurm, "SLURM_TASKS_PER_NODE": "8,4"})
    assert (environment.rank(0, 4), environment.local_rank(), environment.node_rank()) == (8, 0, 1)
    with pytest.raises(MisconfigurationError, match="8,4 tasks on its nodes"):
        environment.check(num_nodes=2, processes_per_node=6)


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}])
def test_a_rank_outside_its_world_is_refused(wrong):
    with pytest.raises(MisconfigurationError, match="counts from 0"):
        detect_environment({**TORCHRUN, **wrong}).check(2, 2)


def test_slurm_s_main_address_can_be_given():
    assert SlurmEnvironment({**SLURM, "MASTER_ADDR": "10.0.0.7"}).main_address() == "10.0.0.7"


@pytest.mark.parametrize(("ranks", "said"), [((0, 1, 2, 3), None), ((0, 1, 0, 1), "none of them is rank 2")])
def test_ranks_that_are_there_twice_are_found_before_training(ranks, said):
    """As if two nodes both had NODE_RANK=0: each of the four ranks reports it, and none waits."""
    port = free_port()
    with ThreadPoolExecutor(len(ranks)) as threads:
        calls = [threads.submit(check_rendezvous, rank, 4, "127.0.0.1", port, timedelta(minutes=10)) for rank in ranks]
    for call in calls:
        if said is None:
            assert call.result() is None
        else:
            with pytest.raises(MisconfigurationError, match=said):
                call.result()


def test_a_rank_that_nobody_joins_gives_up_in_a_sentence():
    with pytest.raises(MisconfigurationError, match="Not all of the 2 ranks came"):
        check_rendezvous(0, 2, "127.0.0.1", free_port(), timedelta(seconds=1))
