"""The batch script of a job, as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from plumbline.core.errors import PlanError


@dataclass(frozen=True)
class BatchScript:
    """The options of a job for sbatch, and what it runs.

    ``options`` are sbatch's, by their long names without dashes, None for one that takes no value; ``comments`` explain
    them, by the same names. ``modules`` are loaded, ``environment`` is set and ``commands`` are run before ``command``
    runs in ``folder``; commands are lines for the shell. The rest of the environment stays as SLURM has set it,
    including CUDA_VISIBLE_DEVICES.

    Raises:
        PlanError: an option or a variable cannot be written to a script.
    """

    options: Mapping[str, str | int | None]
    command: str
    folder: str
    modules: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise PlanError(f"sbatch has no option {name!r}: give its long name without dashes, as in mem=0")
            if re.search(r"[\n\"\\]", f"{value}{self.comments.get(name, '')}"):
                raise PlanError(f"sbatch's option {name} cannot be {value!r}: no quotes, backslashes or line breaks")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise PlanError(f"no variable can be named {name!r}")

    def text(self) -> str:
        lines = ["#!/usr/bin/env bash"]
        for name, value in self.options.items():
            if name in self.comments:
                lines.append(f"# {self.comments[name]}")
            lines.append(f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(str(value))}"))
        if self.modules:
            lines += ["", "# A batch shell has not read /etc/profile, which defines module."]
            lines += ["type module >/dev/null 2>&1 || . /etc/profile"]
            lines += [f"module load {shlex.quote(module)} || exit" for module in self.modules]
        lines += [""] if self.environment else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += ["", *self.commands] if self.commands else []
        lines += ["", f"cd {shlex.quote(self.folder)} || exit", f"exec {self.command}"]
        return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value
