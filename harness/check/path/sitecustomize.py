"""Stands first on PYTHONPATH while ``plumbline check`` runs a command: recording starts in every Python process below.

Python imports it at start-up, before any script. It costs nothing in a process that never imports torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


class _AfterTorch:
    """Finds torch as usual, and installs the recorder as soon as torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _install()

            loader.exec_module = exec_module
        return spec


def _install() -> None:
    """Install the recorder; whatever prevents that is printed, and the script goes on without it."""
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "harness"}
    for name in own:
        del sys.modules[name]
    try:
        package = _HERE.parents[1]
        spec = importlib.util.spec_from_file_location(
            "harness", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["harness"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        from harness.check.rank.activation import activate

        activate(os.environ["PLUMBLINE_CHECK"])
    except Exception as error:
        print(f"plumbline check: nothing is recorded in this process: {error!r}", file=sys.stderr)
    finally:
        # The script may have a package of this name: what is imported above stays in use, but is found no longer.
        for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
            del sys.modules[name]
        sys.modules.update(own)


def _next_sitecustomize() -> None:
    """Run the environment's own ``sitecustomize``, which this file hides."""
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("PLUMBLINE_CHECK"):
    sys.meta_path.insert(0, _AfterTorch())
_next_sitecustomize()
