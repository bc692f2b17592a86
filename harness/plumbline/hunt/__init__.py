"""Searches for training problems on which a trainer is wrong, and shows each without Plumbline."""

from __future__ import annotations
