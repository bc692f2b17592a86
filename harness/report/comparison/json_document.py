"""A comparison as strict JSON, whole: for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from harness.report.comparison.comparison import Comparison
from harness.report.comparison.words import headline
from harness.statistics.intervals import CONFIDENCE

SCHEMA_VERSION: Final = 1


def document(comparison: Comparison, gates: Sequence[str], exit_code: int) -> str:
    """Return one object. ``gates`` are those that caught something. A missing number is null."""
    facts: dict[str, Any] = asdict(comparison)
    for change in (*facts["outcomes"], *facts["figures"]):
        change.update({name: change[name].value for name in ("kind", "verdict") if name in change})
    values = {
        "schema_version": SCHEMA_VERSION,
        "headline": headline(comparison),
        "confidence": CONFIDENCE,
        **facts,
        "verdicts": {verdict.value: count for verdict, count in comparison.verdicts().items()},
        "gates": list(gates),
        "exit_code": exit_code,
    }
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False)
