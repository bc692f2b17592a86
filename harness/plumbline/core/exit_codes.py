"""Exit codes that several commands share."""

from __future__ import annotations

TROUBLE = 2
"""The command failed; standard error says why."""

USAGE = 4
"""The command line is invalid. pytest uses the same code."""

RIGHT, TRAINER_WRONG, ADAPTER_WRONG = 0, 1, 2
"""The results of ``plumbline smoke``."""
