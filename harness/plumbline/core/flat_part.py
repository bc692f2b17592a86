"""A rank's part of a parameter in a flat tensor that holds many parameters."""

from __future__ import annotations

from typing import Any, NamedTuple


class FlatPart(NamedTuple):
    """Entries ``begin`` to ``begin + length`` of a flattened parameter.

    They are ``tensor[offset : offset + length]`` of a one-dimensional ``tensor``, whose ``grad`` has their gradient. If
    ``length`` is 0, this rank has no part of the parameter.
    """

    tensor: Any
    offset: int
    length: int
    begin: int
