"""Describes the machine: devices, driver, software, processor. No host name, address or path."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_ASK_TORCH = """
import importlib.util, json, sys
told = {"python": sys.version.split()[0]}
try:
    import torch
    asked = sys.argv[1]
    if asked == "auto":
        other = not torch.cuda.device_count() and hasattr(torch, "accelerator") and torch.accelerator.is_available()
        asked = torch.accelerator.current_accelerator().type if other else "cuda"
    module = getattr(torch, asked, None)
    told |= {"torch": torch.__version__, "cuda": torch.version.cuda, "accelerator": asked}
    told["gpus"] = module.device_count() if hasattr(module, "device_count") else 0
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        told["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    told["cudnn"] = torch.backends.cudnn.version() if torch.version.cuda else None
    told["arch"] = " ".join(torch.cuda.get_arch_list()) if torch.version.cuda else None
    if asked == "cuda":
        names = [torch.cuda.get_device_properties(i) for i in range(told["gpus"])]
        told["devices"] = [f"{one.name}, {one.total_memory >> 20} MiB, sm_{one.major}{one.minor}" for one in names]
    elif hasattr(module, "get_device_name"):
        told["devices"] = [module.get_device_name(i) for i in range(told["gpus"])]
except Exception as error:
    told["error"] = f"{type(error).__name__}: {error}"
wanted = ("lightning", "accelerate", "transformers", "ignite")
told["modules"] = [name for name in wanted if importlib.util.find_spec(name)]
print("TOLD" + json.dumps(told))
"""


def ask_torch(
    python: str, environment: Mapping[str, str] | None = None, accelerator: str = "auto"
) -> dict[str, object]:
    """Return what an interpreter's torch says about itself and its devices; ``error`` says why it cannot."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH, accelerator],
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("TOLD"):
            return dict(json.loads(line[4:]))
    return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def nvidia_gpus() -> list[list[str]]:
    """Return name, memory, driver and compute mode of each GPU, from nvidia-smi; empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == 4] if done.returncode == 0 else []


def describe(told: Mapping[str, object], commit: str | None) -> dict[str, str]:
    """Return the machine's properties by name; unknown ones are left out."""
    rows = nvidia_gpus()
    named = told.get("devices") or [f"{name}, {memory}" for name, memory, _, _ in rows]
    assert isinstance(named, list)
    kind = "GPUs" if told.get("accelerator", "cuda") == "cuda" else "devices"
    found = {
        kind: "; ".join(f"{count} × {name}" for name, count in Counter(map(str, named)).items()),
        "driver": ", ".join(sorted({row[2] for row in rows})),
        "compute mode": ", ".join(sorted({row[3] for row in rows})),
        "CUDA of torch": told.get("cuda"),
        "torch": told.get("torch"),
        "cuDNN": told.get("cudnn"),
        "NCCL": told.get("nccl"),
        "architectures of torch": told.get("arch"),
        "Python": told.get("python"),
        "CPU": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _memory(),
        "shared memory": _shared_memory(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libraries": ", ".join(map(str, told.get("modules") or [])),  # type: ignore[call-overload]
        "commit": commit,
    }
    return {name: str(value) for name, value in found.items() if value}


def name_of(told: Mapping[str, object]) -> str:
    """Return a short name of the machine: the number and the model of its GPUs."""
    devices = told.get("devices")
    names = [str(one).split(",")[0] for one in devices] if isinstance(devices, list) else []
    names = names or [row[0] for row in nvidia_gpus()]
    words = [f"{count}x-{name}" for name, count in Counter(names).items()] or ["no-gpu"]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (OSError, ValueError):
        return ""


def _shared_memory() -> str:
    try:
        return f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB"
    except OSError:
        return ""
