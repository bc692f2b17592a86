"""Float16 gradients that overflow on purpose: at chosen steps, on one rank only."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Mlp
from plumbline.workloads.dataset import Batch
from plumbline.workloads.updates import ScheduledRate

GAIN = 2.0**12


class _Amplifying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        # The power of two goes out and in again, exactly; on the way back the gradient between is as much larger.
        gain = batch["gain"][:, None]
        outputs: Tensor = self.last(self.first(batch["x"]).tanh() / gain) * gain
        return outputs


class Overflow(Mlp):
    """The perceptron with one sample per epoch whose gradient between two layers is 4096 × as large as the others'.

    Scaled by 2⁹ to 2¹⁶ or more it exceeds float16; for float32, bfloat16 and float64 it is ordinary. Samples come in
    order, so the second of an epoch's three steps overflows, on the rank that has the sample.
    """

    name = "overflow"
    exposes = "overflows found by each rank alone, or ignored; steps that are skipped and move something all the same"
    blocks = 2
    narrow = True
    precisions: ClassVar[tuple[str, ...]] = ("16", "32")
    shuffle = False

    def build(self) -> nn.Module:
        return _Amplifying()

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (16,), the class ``y``, and ``gain``: 1, or 4096 in the middle."""
        planned = torch.arange(count) == count // 2
        return {**super().columns(count, generator), "gain": torch.where(planned, GAIN, 1.0)}


class OverflowSchedule(Overflow, ScheduledRate):
    """Planned overflows with momentum and a learning rate that is another one after every step taken."""

    name = "overflow-schedule"
    exposes = "a schedule, or a momentum, that goes on at a step which was skipped"
    precisions = ("16",)
