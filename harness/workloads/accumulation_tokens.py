"""A mean over tokens under accumulation: of a micro-batch, of a window, of a rank, of all of them?"""

from __future__ import annotations

from typing import ClassVar

from harness.workloads.lm_tokens import LmTokens


class AccumulationTokens(LmTokens):
    """Next-token prediction with windows of two, two and one micro-batches, each with its own number of tokens."""

    name = "accumulation-tokens"
    exposes = "a token count of the wrong scope under accumulation: passed and not used, or divided by a second time"
    needs: ClassVar[frozenset[str]] = frozenset({"accumulation"})
    narrow = True
    precisions = ("32",)
    accumulate = 2
    steps_per_epoch = 5
