"""Lets the tests of this folder import the modules beside them, such as ``ci_runner``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
