"""Chooses which of an optimizer's parameters are judged, if ``--sample-parameters`` asks for a part of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from torch import Tensor


class ParameterSample:
    """A seeded choice of each optimizer's parameters. It is the same on every rank and in every step.

    ``amount`` is the share of parameters if it is below 1, else their number; 0 chooses all. At least one is chosen.
    """

    def __init__(self, amount: float) -> None:
        self._amount = amount
        self._left_out: dict[int, Tensor] = {}  # keeps the parameters alive, so that their ids stay theirs

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Choose among the parameters of one optimizer."""
        if not self._amount or not parameters:
            return
        wanted = math.ceil(self._amount * len(parameters)) if self._amount < 1 else int(self._amount)
        chosen = set(random.Random(0).sample(range(len(parameters)), min(wanted, len(parameters))))
        self._left_out.update({id(one): one for index, one in enumerate(parameters) if index not in chosen})

    def has(self, parameter: Tensor) -> bool:
        return id(parameter) not in self._left_out
