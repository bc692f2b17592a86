"""A rank's part of a parameter where a trainer keeps many of them in one flat tensor, one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple


class FlatPart(NamedTuple):
    """Entries ``begin`` to ``begin + length`` of a parameter, counted as if it were flattened.

    They are ``tensor[offset : offset + length]``; ``tensor`` has one dimension, and the part's gradient is in its
    ``grad``. A ``length`` of 0 says that this rank has nothing of the parameter.
    """

    tensor: Any
    offset: int
    length: int
    begin: int
