"""A node's fork server, started where its ranks are to live: it connects back to the launcher and obeys it.

    PLUMBLINE_TOKEN=… … -m harness.worker --connect 10.0.0.1:47 --as-node '${SLURM_NODEID}' torch

Variables in the two options are this task's, not the launcher's: only the task knows them. By its path,
``python /…/harness/worker/__main__.py``, it also runs in environments that have torch and no Plumbline.
"""

from __future__ import annotations

import sys


def _find_the_package() -> None:
    """Import ``harness`` by its place, and nothing else from the folder around it: that may be another environment."""
    import importlib.util
    import os

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != os.path.join(package, "worker")]
    place = os.path.join(package, "__init__.py")
    spec = importlib.util.spec_from_file_location("harness", place, submodule_search_locations=[package])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if not __package__:
        _find_the_package()
    from harness.worker.node_server import main

    sys.exit(main())
