"""Writes a new file from a skeleton."""

from __future__ import annotations

import re
from pathlib import Path

from plumbline.core.errors import PlumblineError


def write_new_file(path: Path, skeleton: Path, name: str) -> None:
    """Write ``skeleton`` to ``path``, and replace ``name`` in it by the name of the file."""
    if path.suffix != ".py":
        raise PlumblineError(f"{path} is not a Python file: use the name {path.with_suffix('.py').name}")
    own = re.sub(r"[^A-Za-z0-9.+]+", "-", path.stem).strip("-.+") or name
    text = skeleton.read_text(encoding="utf-8").replace(f'"{name}"', f'"{own}"').replace(skeleton.name, path.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PlumblineError(f"{path} already exists; choose another name") from error
    except FileNotFoundError as error:
        raise PlumblineError(f"folder {path.parent} does not exist: create it first") from error
