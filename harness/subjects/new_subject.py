"""Writing a new subject: a file to begin with, which runs at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from harness.core.errors import SubjectError

SKELETON: Final = Path(__file__).with_name("skeleton.py")
NAME: Final = "my-trainer"
"""The subject's name in the skeleton."""
FILE: Final = "skeleton.py"
"""The file's name in the skeleton's text."""


def write_new_subject(path: Path) -> None:
    """Write the skeleton to ``path``, as a subject that is named after the file.

    Raises:
        SubjectError: the file exists, its folder does not, or its name does not end in ``.py``.
    """
    if path.suffix != ".py":
        raise SubjectError(f"{path} is no Python file: call it {path.with_suffix('.py').name}")
    name = re.sub(r"[^A-Za-z0-9.+]+", "-", path.stem).strip("-.+") or NAME
    text = SKELETON.read_text(encoding="utf-8").replace(f'name="{NAME}"', f'name="{name}"').replace(FILE, path.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise SubjectError(f"{path} is there already, and it is left as it is: take another name") from error
    except FileNotFoundError as error:
        raise SubjectError(f"there is no folder {path.parent}: make it first") from error
