"""Python, torch and the trainers: what is installed. Nothing of theirs is run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from harness.core.invocation import command
from harness.machine.doctor.line import Line

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 4)


def python() -> Iterator[Line]:
    """Answer whether this interpreter is new enough for the parent's side."""
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    wanted = ".".join(map(str, OLDEST_PYTHON))
    old = sys.version_info[:2] < OLDEST_PYTHON
    yield Line(found, f"make a virtual environment with Python {wanted} or newer" if old else None)


def torch_build() -> Iterator[Line]:
    """Answer which torch is there, and whether it was built for the GPUs that are."""
    try:
        import torch
    except Exception as error:  # a broken torch raises OSError, RuntimeError, …
        yield Line(f"torch cannot be imported ({type(error).__name__}: {error})", "install it again: pip install torch")
        return
    version = str(torch.__version__)
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_TORCH:
        yield Line(f"torch {version}, {built}", f"take {'.'.join(map(str, OLDEST_TORCH))} or newer")
    else:
        yield Line(f"torch {version}, {built}")


def subjects() -> Iterator[Line]:
    """Answer which of the trainers that ship can be examined here."""
    from harness.subjects.environments import LIBRARIES
    from harness.subjects.short_names import SHORT_NAMES

    there, missing = [], []
    for name in SHORT_NAMES:
        library = LIBRARIES.get(name, "").partition("[")[0]
        try:
            there.append(f"{name} ({library} {metadata.version(library)})" if library else name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    yield Line(", ".join(there))
    if missing:
        listing = command("plumbline", "subjects")
        yield Line(f"not installed, which is fine: {', '.join(missing)} (`{listing}` says how to get them)")
