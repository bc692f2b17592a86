"""Launches trainers that end in some way, and finds leftover processes."""

from __future__ import annotations

import os
import select
import time
from dataclasses import replace
from pathlib import Path

import pytest

from plumbline.judge.judge import judge
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.launch.cell_launch import Settings, start
from plumbline.workloads import WORKLOADS

ENDS = Path(__file__).parent / "subjects" / "ends.py"

LONG = 600.0
"""Seconds after which something hangs. Nothing here depends on the machine's speed."""

SETTLE = 3.0
"""Seconds that the other ranks get to wait for ranks that hang."""


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """The judge's tensors are small."""


@pytest.fixture(scope="session")
def ends(warm_pool):
    """Return the pool of trainers that end in every way."""
    return warm_pool(ENDS)


@pytest.fixture
def launched(warm_pool, cell_of, tmp_path):
    """Launch a trainer, from ``ENDS`` unless a pool is given; return its trace, findings by check, and folder."""

    def launched(subject, topology="1x2", *, backend="ddp", pool=None, workload="mlp", hanging=0):
        """The time limit is long; with ``hanging``, it is reached soon after this many processes hang."""
        backend = "none" if topology == "1x1" else backend
        cell = cell_of(workload, backend, topology, subject=subject)
        folder = tmp_path / subject
        started = start(pool or warm_pool(ENDS), cell, folder, Settings(LONG))
        if hanging:
            until(lambda: sum(log.read_text().count("hangs\n") for log in folder.glob("*.log")) == hanging)
            started = replace(started, running=replace(started.running, deadline=time.monotonic() + SETTLE))
        trace = started.wait_for_trace()
        if not hanging:
            assert trace.seconds < LONG, "the time limit is not waited for"
        findings = {finding.check: finding for finding in judge(TraceAnalysis(trace, WORKLOADS[workload], cell))}
        return trace, findings, folder

    return launched


def until(holds):
    """Wait until ``holds()``."""
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)


@pytest.fixture
def is_gone():
    """Return whether a process ends; a zombie counts as ended."""

    def is_gone(pid: int, seconds: float = LONG) -> bool:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([handle], [], [], seconds)[0])
        finally:
            os.close(handle)

    return is_gone
