"""What is declared by accelerator: the CPU, which simulates devices, or a type of device, by torch's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EVERY_OTHER = "*"
"""The key of what holds for every accelerator that is not a key itself."""


def of_accelerator(declared: Mapping[str, Sequence[str]], accelerator: str) -> Sequence[str]:
    """Return what is declared for ``accelerator``, nothing if it is not declared."""
    return declared.get(accelerator, declared.get(EVERY_OTHER, ()))
