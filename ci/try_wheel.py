"""Tests a built wheel in fresh environments: first with torch alone, then with all its requirements.

    python ci/try_wheel.py                                # of this checkout; this Python, the newest torch
    python ci/try_wheel.py dist/*.whl
    python ci/try_wheel.py dist/*.whl --torch 2.4.1 --python python3.10

``--python`` trains the scripts, and may be older than the Python that runs this program and Plumbline. Installed with
``--no-deps`` beside torch, ``plumbline check`` must say RIGHT about a right script, WRONG about the same script with a
mistake, and RIGHT about every gradient of tensor parallelism by DTensor, which older releases of torch keep elsewhere.
Then, without ``--python``, pip installs what the wheel requires, and the suites must find the reference trainer right
on two devices. With the newest torch, ``plumbline check`` must also say RIGHT about FSDP2 and a pipeline, because it
follows torch's own code there; torch's pipelines need NumPy.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "check_scripts"))

from mistake import DDP, FILES, changed
from mistakes import MISTAKES

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "ci" / "check_scripts" / "scripts"
MISTAKE, NAMED = "inner module called", "not synchronised"
"""The mistake in the script of DistributedDataParallel, and the words for it in the headline of ``plumbline check``."""

OF_TODAY = ("fsdp2.py", "pipeline_stages.py")
"""Right scripts that not every supported release of torch can run."""

SUITE = ("run", "--gpus", "2", "--accelerator", "cpu", "--workloads", "mlp", "--precisions", "32", "-m", "smoke", "-q")


class TryError(Exception):
    """The wheel failed; the message says how."""


def run(command: Sequence[str | Path], folder: Path, *, code: int = 0) -> str:
    """Run a command without this checkout in its environment; return its output.

    Raises:
        TryError: it did not exit with ``code``.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != code:
        raise TryError(f"exit code {done.returncode} instead of {code}: {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def built(folder: Path) -> Path:
    """Build this checkout's wheel into ``folder``; return it."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment(folder: Path, torch: str, python: str | None = None) -> Path:
    """Create an environment with torch alone; return its folder of programs."""
    if python:
        run([python, "-m", "venv", folder], ROOT)
    else:
        venv.create(folder, with_pip=True)
    run([folder / "bin" / "python", "-m", "pip", "install", "-q", f"torch{torch and '=='}{torch}"], ROOT)
    return folder / "bin"


def check(plumbline: str | Path, python: str | Path, folder: Path) -> None:
    """Check a right script, the same script with a mistake, and tensor parallelism, on two ranks of ``python``."""
    right, tensor_parallel = map(script, (FILES[DDP], "tensor_parallel.py"))
    wrong = changed(right, next(one for one in MISTAKES if one.name == MISTAKE).changes[DDP])
    expect((plumbline, python, folder), right, 0, "RIGHT:")
    expect((plumbline, python, folder), wrong, 1, "WRONG:", NAMED)
    expect((plumbline, python, folder), tensor_parallel, 0, "RIGHT: 100 %")


def script(name: str) -> str:
    """Return the text of a script of the corpus."""
    return (SCRIPTS / name).read_text(encoding="utf-8")


def expect(place: tuple[str | Path, str | Path, Path], text: str, code: int, *words: str) -> None:
    """Check a script with the command and the interpreter of ``place``, in its folder.

    Raises:
        TryError: the exit code is another one, or the headline does not have all the words.
    """
    plumbline, python, folder = place
    ranks = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    (folder / "train.py").write_text(text, encoding="utf-8")
    said = run([plumbline, "check", "--stop", "--", *ranks], folder, code=code)
    found = re.search(rf"^{words[0]}.*(\n.*)?", said, re.MULTILINE)  # a headline may have two lines
    headline = found[0] if found else ""
    if not all(word in headline for word in words):
        raise TryError(f"plumbline check does not say {' … '.join(words)}:\n{said}")
    print(headline, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test a wheel, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", help="a built wheel (default: that of this checkout)")
    parser.add_argument("--torch", default="", help="a release of torch, as 2.4.1 (default: the newest)")
    parser.add_argument("--python", help="an interpreter that trains (default: the one that runs Plumbline)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="plumbline-wheel-") as place:
        folder = Path(place)
        try:
            wheel = (options.wheel or built(folder / "dist")).resolve()
            ours = environment(folder / "ours", options.torch)
            theirs = environment(folder / "theirs", options.torch, options.python) if options.python else ours
            install = [str(ours / "python"), "-m", "pip", "install", "-q"]
            run([*install, "--no-deps", wheel], folder)
            version = run([ours / "plumbline", "--version"], folder).strip()
            if version.split()[-1] != wheel.name.split("-")[1]:
                raise TryError(f"{wheel.name} says that it is {version}")
            print(version, flush=True)
            check(ours / "plumbline", theirs / "python", folder)
            if not options.python:
                run([*install, wheel], folder)
                print(run([ours / "plumbline", *SUITE], folder).splitlines()[-1])
                for name in () if options.torch else OF_TODAY:
                    expect((ours / "plumbline", ours / "python", folder), script(name), 0, "RIGHT: 100 %")
            print(f"In all: {version}, torch {options.torch or 'of today'}: passed")
        except TryError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
