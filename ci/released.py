"""Run the conformance suite on a released library, in an environment of its own.

    python ci/released.py lightning                              # all of its cells
    python ci/released.py accelerate --gpus 4 --backends ddp     # further arguments are pytest's

The environment is created if it is missing, as by ``plumbline subjects install``; ``ci/released-constraints.txt`` pins
the library and its dependencies. The exit code is pytest's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from plumbline.subjects.virtual_environments import LIBRARIES, parse_requirement

ROOT = Path(__file__).resolve().parent.parent
PINS = "ci/released-constraints.txt"


def pinned(name: str) -> str:
    """Return the version of a subject's library in ``PINS``."""
    library = re.sub(r"\[.*\]", "", LIBRARIES[name])
    lines = (ROOT / PINS).read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{library}=="))


def in_own_environment(name: str) -> str:
    """Create a subject's environment if it is missing; return the argument of ``--subject``.

    Raises:
        CalledProcessError: it could not be created.
    """
    requirement = f"{name}=={pinned(name)}"
    command = [sys.executable, "-m", "plumbline.cli.main", "subjects", "install", requirement]
    # pip splits this variable at spaces, so the paths are relative to the checkout.
    environment = os.environ | {"PIP_CONSTRAINT": f"constraints.txt {PINS}"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdin=subprocess.DEVNULL)
    return f"{name};python={parse_requirement(requirement).python}"


def main(arguments: Sequence[str]) -> int:
    """Run the suite; return pytest's exit code."""
    if not arguments or arguments[0] not in LIBRARIES:
        print(f"{__doc__}\nSubjects: {', '.join(LIBRARIES)}", file=sys.stderr)
        return 2
    subject = in_own_environment(arguments[0])
    suite = [sys.executable, "-m", "pytest", "suites/conformance", "--subject", subject, *arguments[1:]]
    return subprocess.run(suite, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
