"""Makes modules in this folder importable for its tests, such as ``ci_runner``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
