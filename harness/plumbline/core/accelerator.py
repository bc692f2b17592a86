"""Declarations by accelerator: the CPU, which simulates devices, or a type of device, by torch's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EVERY_OTHER = "*"
"""The key for every accelerator that is not a key itself."""


def of_accelerator(declared: Mapping[str, Sequence[str]], accelerator: str) -> Sequence[str]:
    """Return the declaration for ``accelerator``; empty if there is none."""
    return declared.get(accelerator, declared.get(EVERY_OTHER, ()))
