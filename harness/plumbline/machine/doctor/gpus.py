"""Probes of the CUDA devices and their links. A machine without any is fit for a run: devices are simulated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

from plumbline.machine.doctor.probe_result import ProbeResult
from plumbline.machine.hardware import command_output, gpu_rows

_EXCLUSIVE = ("Exclusive_Process", "Exclusive_Thread", "Prohibited")


def devices() -> Iterator[ProbeResult]:
    """Check which CUDA devices torch sees, and whether several ranks may use them."""
    import torch

    seen = torch.cuda.device_count()
    rows = gpu_rows("name", "memory.total", "compute_mode")
    if not seen:
        if not rows:
            yield ProbeResult("no CUDA device: devices are simulated, by processes and replicas over gloo")
        elif torch.version.cuda:
            yield ProbeResult(
                f"{len(rows)} GPUs are in this machine, and torch sees none",
                "check CUDA_VISIBLE_DEVICES, the driver, and whether the container has access to the GPUs",
            )
        else:
            yield ProbeResult(
                f"{len(rows)} GPUs are in this machine, and torch was built without CUDA", "install a CUDA build"
            )
        return
    if not rows:
        names = [torch.cuda.get_device_properties(index) for index in range(seen)]
        rows = [[one.name, str(one.total_memory >> 20), "Default"] for one in names]
    for (name, memory, mode), count in Counter(map(tuple, rows)).items():
        found = f"{count} × {name}, {memory} MiB, compute mode {mode}"
        yield ProbeResult(found, "nvidia-smi -c 0 lets several processes use a GPU" if mode in _EXCLUSIVE else None)
    if len(rows) != seen:
        yield ProbeResult(f"torch sees {seen} of them, as CUDA_VISIBLE_DEVICES or the container says")


def links() -> Iterator[ProbeResult]:
    """Check how the CUDA devices are linked."""
    import torch

    seen = torch.cuda.device_count()
    if seen < 2:
        yield ProbeResult("fewer than two CUDA devices: nothing to link")
        return
    kinds = link_kinds(command_output("nvidia-smi", "topo", "-m") or "")
    if kinds:
        yield ProbeResult(", ".join(f"{kind} between {_pairs(count)}" for kind, count in kinds.items()))
    apart = [pair for pair in combinations(range(seen), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        shown = ", ".join(f"{first} and {second}" for first, second in apart[:4])
        yield ProbeResult(
            f"no peer access between {_pairs(len(apart))} of devices ({shown}{', …' if len(apart) > 4 else ''})",
            "NCCL copies through the host there: check NCCL_P2P_DISABLE, and ACS in the BIOS",
        )
    else:
        yield ProbeResult(f"each of {seen} devices reaches each other one directly")


def link_kinds(matrix: str) -> dict[str, int]:
    """Return how many pairs of GPUs are linked in which way, from what ``nvidia-smi topo -m`` prints."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    # The header row is indented, and NICs have rows of their own.
    gpus = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return dict(Counter(kind for place, row in enumerate(gpus) for kind in _beside(row, place, len(gpus))))


def _beside(row: Sequence[str], place: int, count: int) -> Sequence[str]:
    """Return the links to the devices after this one: the matrix is symmetric."""
    return row[1 : count + 1][place + 1 :]


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"
