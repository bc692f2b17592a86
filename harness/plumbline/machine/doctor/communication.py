"""Probes that start processes on this machine and let them communicate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.machine.doctor import ProbeResult

if TYPE_CHECKING:
    from plumbline.launch.pool import Pool

TRAINING_LIMIT_S = 10.0
"""Time limit of two ranks that train together, on a machine that starts the fork server at once."""

START_TIMES = 4
"""The limit grows by this many times the start-up time of the fork server, for slow or busy machines."""

FEWEST_PORTS = 1000


def ranks() -> Iterator[ProbeResult]:
    """Train the smallest cell on two ranks, over gloo and over NCCL, and judge whether they averaged gradients."""
    from plumbline.launch.pool import Pool

    begun = time.monotonic()
    with closing(Pool("reference")) as pool:
        assert pool.subjects
        started = time.monotonic() - begun
        yield ProbeResult(f"the fork server started in {started:.1f} s")
        limit = TRAINING_LIMIT_S + START_TIMES * started
        advice = "check that the loopback interface is up and that local processes may connect to each other"
        yield _together(pool, "cpu", "gloo", advice, limit)
        over_nccl = _over_nccl(pool, limit)
    yield over_nccl


def _over_nccl(pool: Pool, limit: float) -> ProbeResult:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return ProbeResult("this build of torch has no NCCL (not needed for simulated devices)")
    version = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    if torch.cuda.device_count() < 2:
        return ProbeResult(f"{version}; not tried: fewer than two CUDA devices")
    advice = "set NCCL_DEBUG=INFO; in a container, check the size of /dev/shm"
    return _together(pool, "cuda", version, advice, limit)


def _together(pool: Pool, accelerator: str, over: str, advice: str, limit: float) -> ProbeResult:
    from plumbline.judge.judge import judge
    from plumbline.judge.trace_analysis import TraceAnalysis
    from plumbline.launch.cell_launch import launch
    from plumbline.launch.settings import Settings
    from plumbline.workloads import find

    cell = Cell("reference", "mlp", "ddp", Topology(1, 2), "32", accelerator)
    with tempfile.TemporaryDirectory(prefix="plumbline-") as folder:
        trace = launch(pool, cell, Path(folder), Settings(time_limit=limit))
    wrong = [finding for finding in judge(TraceAnalysis(trace, find(cell.workload), cell)) if finding.outcome.is_bad]
    if wrong:
        return ProbeResult(f"two ranks failed to train together over {over}: {wrong[0].message}", advice)
    return ProbeResult(f"two ranks trained together over {over} in {trace.seconds:.2f} s and averaged their gradients")


def ports() -> Iterator[ProbeResult]:
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        used = len(Path("/proc/net/tcp").read_text().splitlines()) - 1
    except (OSError, ValueError):
        yield ProbeResult("the system does not report its range of ephemeral ports")
        return
    free = last - first + 1 - used
    advice = "widen net.ipv4.ip_local_port_range, or end processes that hold ports" if free < FEWEST_PORTS else None
    yield ProbeResult(f"{free} of the ports {first} to {last} are free", advice)
