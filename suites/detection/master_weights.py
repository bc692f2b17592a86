"""Mistakes with float32 master weights: in copying, averaging, clipping and rounding."""

from __future__ import annotations

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer
from expect import known_bad, known_good
from loop import alone, loader
from master_trainer import Float32Gradients, MasterWeights
from torch.nn.utils import clip_grad_norm_

from plumbline import FlatPart

FEW = ["mlp/ddp/1x2/bf16-master", "mlp/none/1x1/bf16-master"]
PLAIN = ["mlp/ddp/1x2/bf16-master", "adamw/ddp/1x3/bf16-master"]
ALONE = ["mlp/none/1x1/bf16-master", "adamw/none/1x1/bf16-master"]
WINDOWS = ["accumulation/ddp/1x2/bf16-master", "accumulation/none/1x1/bf16-master"]
CLIPPED = ["clipping/ddp/1x2/bf16-master", "clipping/ddp/1x3/bf16-master"]


@known_good(on=[*PLAIN, *ALONE, *WINDOWS, *CLIPPED, "linear-exact/ddp/1x2/bf16-master"])
class MasterWeightsByHand(MasterWeights):
    """The unmodified trainer."""


@known_good(on=[*PLAIN, *ALONE, *WINDOWS, *CLIPPED, "linear-exact/ddp/1x2/bf16-master"], gradients="float32")
class Float32GradientsByHand(Float32Gradients):
    """The unmodified trainer."""


@known_good(on=[*PLAIN, *WINDOWS[:1]])
class CopiedBackInTheForward(MasterWeights):
    """Copies master weights to the model just before each forward, not after the step."""

    def prepare(self):
        self.model.register_forward_pre_hook(lambda *_: MasterWeights.copy_back(self))

    def copy_back(self):
        """Do nothing: the hook copies."""


@known_good(on=["adamw/ddp/1x2/bf16-master"])
class MastersInReverse(MasterWeights):
    """Gives the optimizer the master weights in reverse order."""

    def make_optimizer(self):
        self.weights = [*self.model.parameters()][::-1]
        self.masters = self.make_masters()
        (optimizer,) = self.job.optimizers(self.masters)
        return optimizer


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class MasterWeightsTruncated(MasterWeights):
    """Truncates master weights to bfloat16 instead of rounding them."""

    @torch.no_grad()
    def copy_back(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_((master.view(torch.int32) & -65536).view(torch.float32))


@known_good(on=["mlp/ddp/1x2/bf16-master", *WINDOWS[:1]])
class OneFlatMaster(MasterWeights):
    """Keeps all master weights in one flat tensor."""

    def make_masters(self):
        self.flat = torch.nn.Parameter(torch.cat([one.detach().float().flatten() for one in self.weights]))
        parts, offset = {}, 0
        for name, weight in self.model.named_parameters():
            parts[name] = FlatPart(self.flat, offset, weight.numel(), 0)
            offset += weight.numel()
        self.job.parts(parts, [self.job.rank])
        return [self.flat]

    def take_gradients(self):
        self.flat.grad = torch.cat([weight.grad.float().flatten() for weight in self.weights])
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def copy_back(self):
        sizes = [weight.numel() for weight in self.weights]
        for weight, values in zip(self.weights, self.flat.split(sizes), strict=True):
            weight.copy_(values.view_as(weight))


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class NeverCopiedBack(MasterWeights):
    """Never copies master weights to the model, which keeps its initial weights."""

    def copy_back(self):
        """Do nothing."""


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *WINDOWS], "precision"))
class CopiedBackOnTheFirstRankAlone(MasterWeights):
    """Copies master weights to the model on rank 0 only; on one device, after every second step only."""

    steps = 0

    def copy_back(self):
        self.steps += 1
        if self.job.rank == 0 and (self.job.world_size > 1 or self.steps % 2):
            super().copy_back()


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class OneWeightNotCopiedBack(MasterWeights):
    """Does not copy the last layer's master weights to the model."""

    @torch.no_grad()
    def copy_back(self):
        for weight, master in list(zip(self.weights, self.masters, strict=True))[:-2]:
            weight.copy_(master)


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys(PLAIN, "precision"))
class CopiedBackBeforeTheStep(MasterWeights):
    """Copies master weights to the model before the step, so the model is one step behind."""

    def step(self):
        self.copy_back()
        BaseTrainer.step(self)


@known_bad("sync", causes=["not-broadcast"], on=[*PLAIN, "mlp/ddp/1x3/bf16-master"])
class MastersRoundedOnOneRank(MasterWeights):
    """The last rank rounds its initial master weights to multiples of 1/16."""

    def make_masters(self):
        masters = super().make_masters()
        if self.job.rank == self.job.world_size - 1:
            for master in masters:
                master.data = (master.data * 16).round() / 16
        return masters


@known_bad("amp", causes=["masters-rounded"], on=dict.fromkeys([*PLAIN, *ALONE], "stillness"))
class MastersMadeOfTheModelAgain(MasterWeights):
    """Copies the model's weights to the master weights before each step, so small updates are lost."""

    @torch.no_grad()
    def take_gradients(self):
        super().take_gradients()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.copy_(weight)


@known_bad("amp", causes=["stored-in-lower-precision"], on=dict.fromkeys([*PLAIN, *ALONE, *CLIPPED], "update"))
class ModelSteppedWithoutMasters(BaseTrainer):
    """Steps the model's bfloat16 weights, without master weights."""


@known_bad("amp", causes=["summed-in-16-bits"], on=dict.fromkeys([*PLAIN, *WINDOWS], "precision"), gradients="float32")
class SummedInBfloat16(Float32Gradients):
    """Declares float32 gradients, but accumulates and all-reduces them in bfloat16."""

    dtype = torch.bfloat16

    def synchronize(self):
        for master in self.masters if self.job.world_size > 1 else ():
            gradient = master.grad.bfloat16() / self.job.world_size
            dist.all_reduce(gradient)
            master.grad = gradient.float()


@known_bad("amp", causes=["summed-in-16-bits"], on=dict.fromkeys(PLAIN, "precision"), gradients="float32")
class Float32GradientsDeclared(MasterWeights):
    """Declares float32 gradients, but DistributedDataParallel averages bfloat16 gradients."""


@known_bad("amp", causes=["trained-in-32-bits"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class MastersComputeThemselves(BaseTrainer):
    """Casts the whole model and its batches to float32."""

    def prepare(self):
        self.model.float()

    def forward(self, batch):
        return super().forward({k: v.float() if v.is_floating_point() else v for k, v in batch.items()})


@known_bad("sync", causes=["not-synchronised"], on=[*PLAIN, "accumulation/ddp/1x2/bf16-master"])
class GradientsTakenBeforeTheyAreAveraged(Float32Gradients):
    """Copies gradients to the master weights before averaging them, so the average has no effect."""

    def synchronize(self):
        """Do nothing: the model's weights have no gradients any more."""


@known_bad("clipping", causes=["clipped-before-averaging"], on=CLIPPED)
class OwnGradientsClipped(Float32Gradients):
    """Each rank clips its own bfloat16 gradients before they are averaged."""

    def after_micro_batch(self, last):
        clip_grad_norm_(self.weights, self.job.clip_norm)
        super().after_micro_batch(last)

    def clip(self):
        """Do nothing: gradients have been clipped."""


@known_bad("clipping", causes=["not-clipped"], on=CLIPPED)
class ModelClippedAfterItsGradientsWereTaken(MasterWeights):
    """Clips the model's gradients after they were copied to the master weights."""

    def take_gradients(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()

    def clip(self):
        clip_grad_norm_(self.weights, self.job.clip_norm)

    def zero_grad(self):
        super().zero_grad()
        self.model.zero_grad()


@known_bad(
    "accumulation",
    causes=["previous-step-not-zeroed"],
    on=FEW,
)
class ModelGradientsNotZeroed(MasterWeights):
    """Zeroes the gradients of master weights, but not those of the model, which accumulate."""

    def take_gradients(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=FEW)
def masters_of_another_model(job):
    """Steps copies of the weights that never get gradients and are never copied back."""
    model = alone(job) if job.world_size > 1 else job.model()
    masters = [torch.nn.Parameter(one.detach().float()) for one in model.parameters()]
    optimizer = job.optimizer(masters)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            model.zero_grad()
