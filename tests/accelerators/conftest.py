"""A custom device type, neither CPU nor CUDA, for processes that these tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DEVICE = Path(__file__).parent / "device"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path) -> Run:
    """Run Python with arguments in an environment where ``import torch`` registers the type ``own``.

    An entry point of ``torch.backends`` registers it, like those of released extensions.
    """
    installed = tmp_path / "installed" / "own_device-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own-device\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[torch.backends]\nown = own_device:load\n")
    paths = [str(installed.parent), str(DEVICE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )

    return python
