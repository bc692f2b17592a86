"""Probes of Python, torch, trainers and devices, and of communication between processes of this machine."""

from __future__ import annotations

import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from plumbline.core.cell import Cell
from plumbline.core.invocation import command
from plumbline.core.numbers import counted
from plumbline.core.topology import Topology
from plumbline.machine.hardware import gpu_rows
from plumbline.machine.software import command_output

if TYPE_CHECKING:
    from plumbline.launch.pool import Pool


@dataclass(frozen=True)
class ProbeResult:
    """What a probe ``found``, with ``advice`` if something is wrong. ``is_note``: runs are possible nevertheless."""

    found: str
    advice: str | None = None
    is_note: bool = False


TRAINING_LIMIT_S = 10.0
"""Time limit for training on two ranks, before it is extended for a slow machine."""

START_TIMES = 4  # the limit grows by this many times the start-up time of the fork server, for slow or busy machines
FEWEST_PORTS = 1000


def ranks() -> Iterator[ProbeResult]:
    """Train the smallest cell on two ranks, over gloo and over the devices' backend, and judge the traces."""
    from plumbline.devices.counting import available
    from plumbline.launch.pool import Pool

    begun = time.monotonic()
    with closing(Pool("reference")) as pool:
        assert pool.subjects
        started = time.monotonic() - begun
        yield ProbeResult(f"the fork server started in {started:.1f} s")
        limit = TRAINING_LIMIT_S + START_TIMES * started
        advice = "check that the loopback interface is up and that local processes may connect to each other"
        yield _together(pool, "cpu", "gloo", advice, limit)
        name, present = available()
        on_devices = _over_nccl(pool, limit) if name in ("cpu", "cuda") else _over_own(pool, name, present, limit)
    yield on_devices


def _over_nccl(pool: Pool, limit: float) -> ProbeResult:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return ProbeResult("this build of torch has no NCCL (not needed for simulated devices)")
    version = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    if torch.cuda.device_count() < 2:
        return ProbeResult(f"{version}; not tried: fewer than two CUDA devices")
    advice = "set NCCL_DEBUG=INFO; in a container, check the size of /dev/shm"
    return _together(pool, "cuda", version, advice, limit)


def _over_own(pool: Pool, accelerator: str, present: int, limit: float) -> ProbeResult:
    from plumbline.devices.types import backend_of, device_type

    backend, label = backend_of(accelerator), device_type(accelerator).label
    if backend is None:
        return ProbeResult(
            f"torch has no communication backend for {label} devices", "use one device, or --accelerator cpu"
        )
    if present < 2:
        return ProbeResult(f"{backend}; not tried: fewer than two {label} devices")
    return _together(pool, accelerator, backend, "see the log of this backend", limit)


def _together(pool: Pool, accelerator: str, over: str, advice: str, limit: float) -> ProbeResult:
    from plumbline.judge.judge import judge
    from plumbline.judge.trace_analysis import TraceAnalysis
    from plumbline.launch.cell_launch import Settings, launch
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


OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 4)


def python() -> Iterator[ProbeResult]:
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    wanted = ".".join(map(str, OLDEST_PYTHON))
    old = sys.version_info[:2] < OLDEST_PYTHON
    yield ProbeResult(found, f"create a virtual environment with Python {wanted} or newer" if old else None)


def torch_build() -> Iterator[ProbeResult]:
    try:
        import torch
    except Exception as error:  # a broken torch raises OSError, RuntimeError, …
        yield ProbeResult(f"torch cannot be imported ({type(error).__name__}: {error})", "reinstall torch")
        return
    version = str(torch.__version__)
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    advice = f"install {'.'.join(map(str, OLDEST_TORCH))} or newer" if numbers < OLDEST_TORCH else None
    yield ProbeResult(f"torch {version}, {built}", advice)


def subjects() -> Iterator[ProbeResult]:
    from plumbline.subjects.load import SHORT_NAMES
    from plumbline.subjects.virtual_environments import LIBRARIES

    there, missing = [], []
    for name in SHORT_NAMES:
        library = LIBRARIES.get(name, "").partition("[")[0]
        try:
            there.append(f"{name} ({library} {metadata.version(library)})" if library else name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    yield ProbeResult(", ".join(there))
    if missing:
        listing = command("plumbline", "subjects")
        yield ProbeResult(f"not installed (optional): {', '.join(missing)}; `{listing}` shows how to install them")


_EXCLUSIVE = ("Exclusive_Process", "Exclusive_Thread", "Prohibited")


def devices() -> Iterator[ProbeResult]:
    import torch

    from plumbline.devices.counting import available, device_names
    from plumbline.devices.types import device_type

    seen = torch.cuda.device_count()
    rows = gpu_rows("name", "memory.total", "compute_mode")
    if not seen:
        name, present = available()
        if present:
            models = " + ".join(device_names(name) or ()) or "model not reported by torch"
            yield ProbeResult(f"{counted(present, f'{device_type(name).label} device')}: {models}")
        elif not rows:
            yield ProbeResult("no CUDA device: runs use simulated devices (CPU processes over gloo)")
        elif torch.version.cuda:
            yield ProbeResult(
                f"this machine has {counted(len(rows), 'GPU')}, but torch sees none",
                "check CUDA_VISIBLE_DEVICES, the driver, and the container's access to GPUs",
            )
        else:
            yield ProbeResult(
                f"this machine has {counted(len(rows), 'GPU')}, but torch was built without CUDA",
                "install a CUDA build",
            )
        return
    if not rows:
        names = [torch.cuda.get_device_properties(index) for index in range(seen)]
        rows = [[one.name, str(one.total_memory >> 20), "Default"] for one in names]
    for (name, memory, mode), count in Counter(map(tuple, rows)).items():
        found = f"{count} × {name}, {memory} MiB, compute mode {mode}"
        yield ProbeResult(found, "nvidia-smi -c 0 lets several processes use a GPU" if mode in _EXCLUSIVE else None)
    if len(rows) != seen:
        yield ProbeResult(
            f"torch sees only {seen} of them: check CUDA_VISIBLE_DEVICES, and the container's access to GPUs"
        )


def links() -> Iterator[ProbeResult]:
    import torch

    seen = torch.cuda.device_count()
    if seen < 2:
        yield ProbeResult("fewer than two CUDA devices")
        return
    kinds = link_kinds(command_output("nvidia-smi", "topo", "-m") or "")
    if kinds:
        yield ProbeResult(", ".join(f"{kind} between {counted(count, 'pair')}" for kind, count in kinds.items()))
    apart = [pair for pair in combinations(range(seen), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        shown = ", ".join(f"{first} and {second}" for first, second in apart[:4])
        shown += ", …" if len(apart) > 4 else ""
        yield ProbeResult(
            f"no peer access between {counted(len(apart), 'pair')} of devices ({shown})",
            "NCCL copies through the host between them: check NCCL_P2P_DISABLE, and ACS in the BIOS",
        )
    else:
        yield ProbeResult(f"all {seen} devices have peer access to each other")


def link_kinds(matrix: str) -> dict[str, int]:
    """Count the pairs of GPUs by the kind of their link, from the output of ``nvidia-smi topo -m``."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    # The header row is indented, and NICs have rows of their own.
    gpus = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    # The matrix is symmetric: count only the entries to the right of the diagonal.
    links_to_later = (row[index + 2 : len(gpus) + 1] for index, row in enumerate(gpus))
    return dict(Counter(kind for row in links_to_later for kind in row))
