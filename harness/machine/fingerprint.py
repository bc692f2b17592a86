"""What machine and what software a run came from.

Two parts, kept apart: the *comparability key*, which must be equal before two runs' figures may be compared,
and the fuller record for whoever looks into a difference. Reports get published, so neither holds a host
name, a user name, a path, or any environment variable beyond a short list.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.machine.hardware import (
    clocks_and_load,
    command_output,
    cpu_governor,
    cpu_model,
    gpu_rows,
    usable_cores,
)

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
# No slash, backslash, @ or blank: a value that could be a path or an address is not a setting we publish.
_PUBLIC_VALUE = re.compile(r"[\w.,:=+\[\]-]{1,100}", re.ASCII)

# Of a distribution, and its version (PEP 440): nothing that could be a path or an address.
_PUBLIC_NAME = re.compile(r"[\w.+!-]{1,100}", re.ASCII)


class ComparabilityKey(BaseModel):
    """What must be equal for two runs' speed and memory to be comparable. None: not there, or not found.

    ``device`` is the model of what computes (the GPU's name, or the CPU's where devices are simulated),
    ``device_count`` how many of them torch sees on this node, ``nodes`` how many machines take part,
    ``cpu_cores`` how many cores this process may use, ``torch`` the minor version (``2.13``).
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
    """The comparability key, and beside it what helps to explain a difference.

    ``commit`` is plumbline's own, with ``-dirty`` where its code had changes; None outside a checkout.
    ``compute_capability`` is that of the least able GPU. ``clocks_and_load`` is how the run found the machine, a
    figure by its name and unit; ``packages`` is what is installed beside plumbline, by version.
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


def take_fingerprint(accelerator: str, nodes: int = 1) -> Fingerprint:
    """Look at this machine; ``nodes`` is the number of machines that take part, simulated nodes not counted.

    Never raises: what cannot be found out is None. Imports torch but does not touch CUDA, because ranks may
    yet be forked from this process and a fork after the first CUDA call is broken.
    """
    cpu = cpu_model()
    software = _torch_versions()
    key = ComparabilityKey(
        accelerator=accelerator,
        device=cpu,
        nodes=nodes,
        cpu=cpu,
        cpu_cores=usable_cores(),
        torch=_minor(software.get("torch")),
    )
    if accelerator == "cuda":
        names, driver = _gpus()
        key = key.model_copy(
            update={
                "device": names,
                "device_count": _visible_gpus(),
                "cuda": software.get("cuda"),
                "nccl": software.get("nccl"),
                "driver": driver,
            }
        )
    return Fingerprint(
        key=key,
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=software.get("torch"),
        pandas=_installed_version("pandas"),
        commit=project_commit(),
        environment=public_environment(os.environ),
        compute_capability=_compute_capability() if accelerator == "cuda" else None,
        cpu_governor=cpu_governor(),
        clocks_and_load=clocks_and_load(),
        packages=_packages(),
    )


def public_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what a trainer computes or how fast, and that give nobody away."""
    return {
        name: environment[name]
        for name in _PUBLIC_VARIABLES
        if name in environment and _PUBLIC_VALUE.fullmatch(environment[name])
    }


def plumbline_version() -> str:
    """Return the installed version, or ``unknown`` where plumbline runs without being installed."""
    return _installed_version("plumbline") or "unknown"


def project_commit(root: Path | None = None) -> str | None:
    """Return the commit of plumbline's checkout at ``root``, with ``-dirty`` if its code has changes.

    None where there is no checkout: an installed plumbline may lie in somebody else's repository, whose
    commit would say nothing.
    """
    root = root or Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = command_output("git", "-C", str(root), "rev-parse", "--verify", "HEAD")
    if commit is None or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return None
    # Only the code that ran counts: a report or a note that lies about does not make the run another one.
    changes = command_output(
        "git", "--no-optional-locks", "-C", str(root), "status", "--porcelain", "--", "harness", "suites"
    )
    return commit if changes == "" else f"{commit}-dirty"


def _torch_versions() -> dict[str, str]:
    try:
        import torch
    except Exception:  # a broken torch raises OSError, RuntimeError, …; the fingerprint is best effort
        return {}
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["nccl"] = ".".join(map(str, nccl))
    return versions


def _visible_gpus() -> int | None:
    try:
        import torch

        return torch.cuda.device_count()  # asks NVML, and so does not initialise CUDA
    except Exception:
        return None


def _gpus() -> tuple[str | None, str | None]:
    """Return the models in this node (``A + B`` if they differ) and the driver's version."""
    # Not from torch: asking it for a device's name initialises CUDA in this process.
    rows = gpu_rows("name", "driver_version")
    return (" + ".join(sorted({name for name, _ in rows})), rows[0][1]) if rows else (None, None)


def _compute_capability() -> str | None:
    """Return the lowest among the GPUs, for example ``9.0``."""
    found = [capability for (capability,) in gpu_rows("compute_cap") if re.fullmatch(r"\d{1,3}\.\d{1,3}", capability)]
    return min(found, key=lambda capability: tuple(map(int, capability.split("."))), default=None)


def _packages() -> dict[str, str]:
    """Return every installed distribution with its version: what ``pip list`` prints."""
    found = {(each.metadata["Name"] or "").lower(): each.version for each in metadata.distributions()}
    return {
        name: version
        for name, version in sorted(found.items())
        if _PUBLIC_NAME.fullmatch(name) and _PUBLIC_NAME.fullmatch(version or "")
    }


def _minor(version: str | None) -> str | None:
    return ".".join(version.split("+")[0].split(".")[:2]) if version else None


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
