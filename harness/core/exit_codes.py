"""Exit codes that commands share; what else a command may end with is in its own file."""

from __future__ import annotations

TROUBLE = 2
"""It could not be done; a sentence on standard error says why."""

USAGE = 4
"""The command line is wrong, as pytest's code for it."""

RIGHT, TRAINER_WRONG, ADAPTER_WRONG = 0, 1, 2
"""Whose mistake it is, as ``smoke`` says it."""
