"""Wrong precision: the loss scale left in, infinities ignored or decided alone, another precision than asked for."""

from __future__ import annotations

import torch
import torch.distributed
from right import ByHand, Trainer, declare


class ScaledStep(Trainer):
    """The optimizer steps on gradients that still carry the loss scale."""

    def step(self):
        self.optimizer.step()


class InfinitiesIgnored(Trainer):
    """A scale that overflows, divided out by hand, and the step is taken whatever came of it."""

    scale = 2.0**40

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self):
        for gradient in self.gradients:
            gradient /= self.scale
        self.optimizer.step()


class DecidedAlone(ByHand):
    """Each rank looks for infinities in its own share of the gradients, as a sharded scaler that forgot to ask."""

    attempts = 0

    def synchronize(self):
        super().synchronize()
        self.attempts += 1
        if self.attempts == 2 and self.job.rank == 1:
            self.gradients[0].fill_(float("inf"))


class MovesWhenSkipped(Trainer):
    """The scale begins too high: the scaler skips steps, the weights move all the same."""

    def make_scaler(self):
        return torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step(self):
        super().step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01


class Overflows(Trainer):
    """Right: the scale begins too high, steps are skipped until it fits."""

    def make_scaler(self):
        return torch.amp.GradScaler("cpu", init_scale=2.0**20)


class SkipsForNothing(Trainer):
    """A scaler that skips a step although every gradient is finite."""

    attempts = 0

    def step(self):
        self.attempts += 1
        if self.attempts == 2:
            self.scaler.unscale_(self.optimizer)
            state = self.scaler._per_optimizer_states[id(self.optimizer)]
            for found in state["found_inf_per_device"].values():
                found.fill_(1.0)
        super().step()


class SilentlyFloat32(Trainer):
    """Asked for float64, it trains in float32."""

    def forward(self, batch):
        self.wrapped.float()
        return super().forward({k: v.float() if v.is_floating_point() else v for k, v in batch.items()})

    def loss(self, outputs, batch):
        return super().loss(outputs, {k: v.float() if v.is_floating_point() else v for k, v in batch.items()})


class SilentlyBfloat16(Trainer):
    """Asked for float32, its matrix work is in bfloat16."""

    def forward(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(batch)


class PrecisionIgnored(Trainer):
    """Asked for 16 bits, it trains in float32."""

    def forward(self, batch):
        with torch.autocast("cpu", enabled=False):
            return super().forward(batch)

    def loss(self, outputs, batch):
        with torch.autocast("cpu", enabled=False):
            return super().loss(outputs, batch)


subjects = [
    declare("scaled-step", ScaledStep),
    declare("infinities-ignored", InfinitiesIgnored),
    declare("decided-alone", DecidedAlone),
    declare("moves-when-skipped", MovesWhenSkipped),
    declare("overflows", Overflows),
    declare("skips-for-nothing", SkipsForNothing),
    declare("silently-float32", SilentlyFloat32),
    declare("silently-bfloat16", SilentlyBfloat16),
    declare("precision-ignored", PrecisionIgnored),
]
