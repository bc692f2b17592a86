"""The fingerprint of a run: its machine and software, without paths or the names of hosts and users."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress

from pydantic import BaseModel, ConfigDict

from plumbline.core.software import installed_version
from plumbline.machine.hardware import clocks_and_load, cpu_governor, cpu_model, gpu_rows, usable_cores
from plumbline.machine.software import packages, project_commit, torch_versions

_PUBLIC_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_NCCL_BLOCKING_WAIT",
)
# No slash, backslash, @ or blank: a value that could be a path or an address is not published.
_PUBLIC_VALUE = re.compile(r"[\w.,:=+\[\]-]{1,100}", re.ASCII)


class ComparabilityKey(BaseModel):
    """The values that must be equal for two runs' speed and memory to be comparable. None: absent or unknown.

    ``device`` is the model of the devices, or of the CPU if devices are simulated. ``device_count`` is the number of
    devices that torch sees on this node, ``nodes`` the number of machines, ``cpu_cores`` the number of cores that this
    process may use, and ``torch`` the minor version (``2.13``).
    ``cuda``, ``nccl`` and ``driver`` are versions for NVIDIA GPUs.
    """

    model_config = ConfigDict(frozen=True)

    accelerator: str = ""
    device: str | None = None
    device_count: int | None = None
    nodes: int = 1
    cpu: str | None = None
    cpu_cores: int | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None


class Fingerprint(BaseModel):
    """The comparability key, and values that help to explain a difference between runs.

    ``commit`` is Plumbline's commit, with ``-dirty`` if its code had changes; None outside a checkout.
    ``compute_capability`` is the lowest of all GPUs. ``clocks_and_load`` has figures from the start of the run, by name
    and unit; ``packages`` has the versions of all installed distributions.
    """

    model_config = ConfigDict(frozen=True)

    key: ComparabilityKey = ComparabilityKey()
    platform: str | None = None
    python: str | None = None
    torch: str | None = None
    pandas: str | None = None
    commit: str | None = None
    environment: dict[str, str] = {}
    compute_capability: str | None = None
    cpu_governor: str | None = None
    clocks_and_load: dict[str, float] = {}
    packages: dict[str, str] = {}


def take_fingerprint(accelerator: str) -> Fingerprint:
    """Return the fingerprint of this machine. Initialises no device, because that would not survive forking ranks."""
    cpu = cpu_model()
    software = torch_versions()
    key = ComparabilityKey(
        accelerator=accelerator,
        device=cpu,
        cpu=cpu,
        cpu_cores=usable_cores(),
        torch=".".join(software["torch"].split("+")[0].split(".")[:2]) if "torch" in software else None,
    )
    present = _count(accelerator) if "torch" in software else None
    if accelerator == "cuda":
        names, driver = _gpus()
        built = {"cuda": software.get("cuda"), "nccl": software.get("nccl")}
        key = key.model_copy(update={"device": names, "device_count": present, "driver": driver, **built})
    elif accelerator != "cpu":
        key = key.model_copy(update={"device": device_name(accelerator), "device_count": present})
    return Fingerprint(
        key=key,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=software.get("torch"),
        pandas=installed_version("pandas"),
        commit=project_commit(),
        environment=public_environment(os.environ),
        compute_capability=_compute_capability() if accelerator == "cuda" else None,
        cpu_governor=cpu_governor(),
        clocks_and_load=clocks_and_load(),
        packages=packages(),
    )


def device_name(accelerator: str) -> str | None:
    """Return the model of the devices, or of the CPU if devices are simulated."""
    if accelerator == "cpu":
        return cpu_model()
    if accelerator == "cuda":
        return _gpus()[0]
    from plumbline.devices.counting import device_names

    return " + ".join(device_names(accelerator) or ()) or None


def _count(accelerator: str) -> int | None:
    from plumbline.devices.counting import count

    with suppress(Exception):
        return count(accelerator)
    return None


def public_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change results or speed and identify nobody."""
    return {
        name: environment[name]
        for name in _PUBLIC_VARIABLES
        if name in environment and _PUBLIC_VALUE.fullmatch(environment[name])
    }


def _gpus() -> tuple[str | None, str | None]:
    # Not from torch: asking it for a device's name initialises CUDA in this process.
    rows = gpu_rows("name", "driver_version")
    return (" + ".join(sorted({name for name, _ in rows})), rows[0][1]) if rows else (None, None)


def _compute_capability() -> str | None:
    found = [capability for (capability,) in gpu_rows("compute_cap") if re.fullmatch(r"\d{1,3}\.\d{1,3}", capability)]
    return min(found, key=lambda capability: tuple(map(int, capability.split("."))), default=None)
