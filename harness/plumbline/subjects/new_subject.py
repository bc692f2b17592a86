"""Writing a new subject: a file to begin with, which runs at once."""

from __future__ import annotations

from pathlib import Path

from plumbline.user_code.new_file import write_new_file


def write_new_subject(path: Path) -> None:
    """Write the skeleton to ``path``, as a subject that is named after the file.

    Raises:
        PlumblineError: the file exists, its folder does not, or its name does not end in ``.py``.
    """
    write_new_file(path, Path(__file__).with_name("skeleton.py"), "my-trainer")
