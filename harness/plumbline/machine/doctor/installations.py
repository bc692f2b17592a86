"""Probes of the installed Python, torch and trainers. No trainer is imported."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from plumbline.core.invocation import command
from plumbline.machine.doctor.probe_result import ProbeResult

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
        yield ProbeResult(
            f"torch cannot be imported ({type(error).__name__}: {error})",
            "reinstall torch",
        )
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
