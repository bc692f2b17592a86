"""A training that is resumed by another number of devices than it was interrupted on."""

from __future__ import annotations

from typing import ClassVar

from harness.workloads.adamw import AdamW


class CheckpointElastic(AdamW):
    """AdamW with two groups; a step has the same samples on two devices as on three."""

    name = "checkpoint-elastic"
    exposes = "moments or their count lost, a place in the epoch counted by each rank, when other ranks resume"
    needs: ClassVar[frozenset[str]] = frozenset({"checkpoint"})
    precisions = ("32",)
    steps_per_epoch = 8
    interrupt_after = 12
    elastic = True
    needs_epochs = "asks for the same samples from another number of ranks"
