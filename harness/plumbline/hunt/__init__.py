"""Searches for training problems on which a trainer is wrong, and reproduces each failure without Plumbline."""

from __future__ import annotations
