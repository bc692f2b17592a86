"""Right trainers with bfloat16 weights and float32 master weights. A mistake overrides one method."""

from __future__ import annotations

import torch
from base_trainer import BaseTrainer, ManualAverage
from torch.nn.utils import clip_grad_norm_


class MasterWeights(BaseTrainer):
    """Averages bfloat16 gradients with DistributedDataParallel, and copies them to the master weights."""

    def make_optimizer(self):
        self.weights = list(self.model.parameters())
        self.masters = self.make_masters()
        (optimizer,) = self.job.optimizers(self.masters)
        return optimizer

    def make_masters(self):
        return [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]

    def synchronize(self):
        super().synchronize()
        self.take_gradients()

    def take_gradients(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None

    def clip(self):
        clip_grad_norm_(self.masters, self.job.clip_norm)

    def step(self):
        super().step()
        self.copy_back()

    @torch.no_grad()
    def copy_back(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)


class Float32Gradients(MasterWeights, ManualAverage):
    """Accumulates and averages gradients in float32, beside the master weights."""

    dtype = torch.float32

    def after_micro_batch(self, last):
        for weight, master in zip(self.weights, self.masters, strict=True):
            gradient, weight.grad = weight.grad.to(self.dtype), None
            total = gradient if master.grad is None else master.grad.to(self.dtype) + gradient
            master.grad = total.float()

    def synchronize(self):
        for master in self.masters if self.job.world_size > 1 else ():
            gradient = master.grad.to(self.dtype)
            torch.distributed.all_reduce(gradient)
            master.grad = gradient.float() / self.job.world_size
