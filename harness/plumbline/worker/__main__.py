"""A fork server: on the launcher's machine, or on a node, where it connects back to the launcher.

    python -m plumbline.worker torch
    PLUMBLINE_TOKEN=… python -m plumbline.worker --connect 10.0.0.1:47 --as-node '${SLURM_NODEID}' torch

The task expands variables in the two options, because the launcher does not know their values. By its path,
``python /…/plumbline/worker/__main__.py``, it also runs in environments that have torch and no Plumbline.
"""

from __future__ import annotations

import sys


def _find_the_package() -> None:
    """Import ``plumbline`` without the folder around it, which may have the packages of another environment."""
    import os

    worker = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != worker]
    sys.path.insert(0, os.path.join(worker, "path"))
    import plumbline  # noqa: F401

    del sys.path[0]


if __name__ == "__main__":
    if not __package__:
        _find_the_package()
    if "--connect" in sys.argv:
        from plumbline.worker import node_server

        sys.exit(node_server.main())
    from plumbline.worker import server

    server.main()
