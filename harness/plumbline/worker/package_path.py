"""The folder that makes ``import plumbline`` work in another process or environment, and adds nothing else."""

from __future__ import annotations

from pathlib import Path

PACKAGE_PATH = str(Path(__file__).with_name("path"))
"""For ``sys.path`` or PYTHONPATH. The folder around the package may be another environment's site-packages."""
