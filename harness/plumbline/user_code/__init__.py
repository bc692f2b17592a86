"""Users' files: importing them, and the tracebacks of what they raise."""

from __future__ import annotations
