"""Comes first on PYTHONPATH while ``plumbline check`` runs a command, and starts recording in its Python processes.

Python imports it at start-up, before any script. It notes that the process exists, and costs nothing more in a process
that never imports torch. It runs on Python 3.6 and newer, so that it can report a Python version that is too old.
"""

import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys

TYPE_CHECKING = False  # importing it from typing would cost time in every process
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("PLUMBLINE_CHECK", "")
_OLDEST_PYTHON = (3, 10)
_OLDEST_TORCH = (2, 4)
_PROCESS = os.getpid()


def _note(**facts: object) -> None:
    """Append a line to this process's notes. The last value of each fact counts."""
    try:
        number = os.open(os.path.join(_FOLDER, f"process-{os.getpid()}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(number, (json.dumps(facts) + "\n").encode())
        finally:
            os.close(number)
    except OSError:
        pass  # the folder is gone or full, which the check itself reports


def _began() -> None:
    _note(
        python=".".join(map(str, sys.version_info[:3])),
        words=list(getattr(sys, "orig_argv", ())),
        rank=os.environ.get("RANK") or os.environ.get("SLURM_PROCID"),
    )


def _ends() -> None:
    if os.getpid() == _PROCESS:  # not in a forked process, which did not start here
        error = getattr(sys, "last_value", None)  # set if an exception was not caught
        told = str(error).strip()
        if "Traceback (most recent call last)" in told:  # of the process that this one has started
            told = told.splitlines()[-1]
        _note(ended=True, raised="" if error is None else f"{type(error).__name__}: {told[:300]}")


class _AfterTorch:
    """Finds torch as usual, and installs the recorder as soon as torch has been imported."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # the caller may only ask whether torch is installed
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: "Any") -> None:
                sys.meta_path.remove(self)
                load(module)
                _install(module)

            loader.exec_module = exec_module
        return spec


def _install(torch: "Any") -> None:
    """Install the recorder. If something prevents this, note it; the script then goes on without the recorder."""
    obstacle = _too_old(str(torch.__version__))
    _note(torch=str(torch.__version__), obstacle=obstacle)
    if obstacle:
        return
    try:
        # plumbline.py in this folder makes the package importable, but not the other packages in its site-packages.
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(_HERE)), "worker", "path"))
        try:
            import plumbline
        finally:
            del sys.path[0]
        plumbline.import_uncollected("plumbline.check.rank.install").activate(_FOLDER, _note)
    except Exception as error:
        _note(obstacle=f"the recorder cannot be installed ({type(error).__name__}: {error})")


def _too_old(torch: str) -> str:
    """Return what is too old for recording; "" if nothing is."""
    if sys.version_info < _OLDEST_PYTHON:
        return f"Python {_dotted(sys.version_info[:2])} is too old: {_dotted(_OLDEST_PYTHON)} is needed"
    numbers = [int(part) for part in torch.partition("+")[0].split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and tuple(numbers) < _OLDEST_TORCH:
        return f"torch {torch} is too old: {_dotted(_OLDEST_TORCH)} is needed"
    return ""


def _dotted(version: "tuple[int, ...]") -> str:
    return ".".join(map(str, version))


def _next_sitecustomize() -> None:
    """Run the environment's own ``sitecustomize``, which this file hides."""
    elsewhere = [entry for entry in sys.path if entry and os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _FOLDER:
    _began()
    atexit.register(_ends)
    sys.meta_path.insert(0, _AfterTorch())
_next_sitecustomize()
