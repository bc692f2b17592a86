"""More ranks than this machine can hold are refused, with the numbers, before any is forked."""

from __future__ import annotations

import os

import pytest

from plumbline.core.errors import LaunchError, PlanError
from plumbline.launch import this_machine
from plumbline.launch.this_machine import why_too_many
from plumbline.planning.devices import parse_mesh
from plumbline.planning.plan import Matrix, check_ranks
from plumbline.ranks.run import run_on_ranks

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    def of(free, processes=None):
        monkeypatch.setattr(this_machine, "free_bytes_of_host", lambda: free)
        monkeypatch.setattr(this_machine, "_processes_left", lambda: processes)

    return of


def test_memory_that_lacks_is_told_in_numbers(machine):
    machine(24 * GIB)
    assert why_too_many(1_000_000) == (
        "1000000 ranks need about 5,859 GiB of memory, and this machine has 24 GiB free: use fewer"
    )


def test_many_simulated_ranks_stay_allowed(machine):
    machine(24 * GIB, 32768)
    assert why_too_many(512) == ""
    machine(GIB)
    assert why_too_many(96) == ""
    machine(None)
    assert why_too_many(1_000_000) == ""


def test_processes_are_limited_too(machine):
    machine(None, 100)
    assert why_too_many(101) == "101 ranks need 101 processes, and this machine allows at most 100: use fewer"


def test_a_limit_of_this_machine_is_known_wherever_linux_tells_it():
    if os.path.exists("/proc/sys/kernel/pid_max"):
        assert why_too_many(1 << 40)
    assert why_too_many(2) == ""


def test_ranks_of_a_test_and_of_a_plan_are_refused(machine, monkeypatch):
    machine(GIB)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    with pytest.raises(LaunchError, match="1000000 ranks need about"):
        run_on_ranks(lambda terminal: None, 1_000_000, timeout=1)
    for matrix in (Matrix(1000, nodes=2), Matrix(4, meshes=(parse_mesh("dp=1000,tp=2"),))):
        with pytest.raises(PlanError, match="2000 ranks need about"):
            check_ranks(matrix)
