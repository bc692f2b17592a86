"""A node's fork server, started where its ranks are to live: it connects back to the launcher and obeys it.

    PLUMBLINE_TOKEN=… … -m plumbline.worker --connect 10.0.0.1:47 --as-node '${SLURM_NODEID}' torch

Variables in the two options are this task's, not the launcher's: only the task knows them. By its path,
``python /…/harness/plumbline/worker/__main__.py``, it also runs in environments that have torch and no Plumbline.
"""

from __future__ import annotations

import sys


def _find_the_package() -> None:
    """Import ``plumbline`` by its place, and nothing else from there: that may be another environment."""
    import os

    worker = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != worker]
    sys.path.insert(0, os.path.join(worker, "path"))
    import plumbline  # noqa: F401

    del sys.path[0]


if __name__ == "__main__":
    if not __package__:
        _find_the_package()
    from plumbline.worker.node_server import main

    sys.exit(main())
