"""Probes of the installed Python, torch and trainers, and of the CUDA devices. No trainer is imported."""

from __future__ import annotations

import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from itertools import combinations

from plumbline.core.invocation import command
from plumbline.machine.doctor import ProbeResult
from plumbline.machine.hardware import gpu_rows
from plumbline.machine.software import command_output

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
    if numbers < OLDEST_TORCH:
        yield ProbeResult(f"torch {version}, {built}", f"install {'.'.join(map(str, OLDEST_TORCH))} or newer")
    else:
        yield ProbeResult(f"torch {version}, {built}")


def subjects() -> Iterator[ProbeResult]:
    from plumbline.subjects.short_names import SHORT_NAMES
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

    seen = torch.cuda.device_count()
    rows = gpu_rows("name", "memory.total", "compute_mode")
    if not seen:
        if not rows:
            yield ProbeResult("no CUDA device: runs use simulated devices (CPU processes over gloo)")
        elif torch.version.cuda:
            yield ProbeResult(
                f"this machine has {_gpus(len(rows))}, but torch sees none",
                "check CUDA_VISIBLE_DEVICES, the driver, and the container's access to GPUs",
            )
        else:
            yield ProbeResult(
                f"this machine has {_gpus(len(rows))}, but torch was built without CUDA", "install a CUDA build"
            )
        return
    if not rows:
        names = [torch.cuda.get_device_properties(index) for index in range(seen)]
        rows = [[one.name, str(one.total_memory >> 20), "Default"] for one in names]
    for (name, memory, mode), count in Counter(map(tuple, rows)).items():
        found = f"{count} × {name}, {memory} MiB, compute mode {mode}"
        yield ProbeResult(found, "nvidia-smi -c 0 lets several processes use a GPU" if mode in _EXCLUSIVE else None)
    if len(rows) != seen:
        yield ProbeResult(f"torch sees {seen} of them: see CUDA_VISIBLE_DEVICES, or the container's access to GPUs")


def links() -> Iterator[ProbeResult]:
    import torch

    seen = torch.cuda.device_count()
    if seen < 2:
        yield ProbeResult("fewer than two CUDA devices")
        return
    kinds = link_kinds(command_output("nvidia-smi", "topo", "-m") or "")
    if kinds:
        yield ProbeResult(", ".join(f"{kind} between {_pairs(count)}" for kind, count in kinds.items()))
    apart = [pair for pair in combinations(range(seen), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        shown = ", ".join(f"{first} and {second}" for first, second in apart[:4])
        yield ProbeResult(
            f"no peer access between {_pairs(len(apart))} of devices ({shown}{', …' if len(apart) > 4 else ''})",
            "NCCL copies through the host between them: check NCCL_P2P_DISABLE, and ACS in the BIOS",
        )
    else:
        yield ProbeResult(f"all {seen} devices have peer access to each other")


def link_kinds(matrix: str) -> dict[str, int]:
    """Count the pairs of GPUs by the kind of their link, from the output of ``nvidia-smi topo -m``."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    # The header row is indented, and NICs have rows of their own.
    gpus = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    # The matrix is symmetric: each row counts from its diagonal on.
    links_to_later = (row[place + 2 : len(gpus) + 1] for place, row in enumerate(gpus))
    return dict(Counter(kind for row in links_to_later for kind in row))


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"
