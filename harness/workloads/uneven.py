"""A number of samples that is a multiple of nothing."""

from __future__ import annotations

from harness.workloads.mlp import Mlp

MISSING = 7


class Uneven(Mlp):
    """The perceptron with a last batch that lacks seven samples; repeats, to pad it, are fewer than there are ranks."""

    name = "uneven"
    exposes = "a tail that is dropped, or padded with more repeats than there are ranks; chunks of unequal size"
    narrow = True
    precisions = ("32",)
    needs_epochs = "asks for the last batch of an epoch"

    def samples(self, devices: int) -> int:
        """Return seven fewer than whole batches have."""
        return super().samples(devices) - MISSING
