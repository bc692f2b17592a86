"""Exit codes that commands share; those of a single command are in its own file."""

from __future__ import annotations

TROUBLE = 2
"""The command failed; a sentence on standard error says why."""

USAGE = 4
"""The command line is invalid; pytest has the same code for it."""

RIGHT, TRAINER_WRONG, ADAPTER_WRONG = 0, 1, 2
"""What ``plumbline smoke`` found: no mistake, one of the trainer, or one of its adapter."""
