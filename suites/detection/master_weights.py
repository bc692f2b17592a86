"""bfloat16 weights with float32 master weights: what is copied between them, when, on which ranks, and how rounded."""

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
    """It is right as it is."""


@known_good(on=[*PLAIN, *ALONE, *WINDOWS, *CLIPPED, "linear-exact/ddp/1x2/bf16-master"], gradients="float32")
class Float32GradientsByHand(Float32Gradients):
    """It is right as it is."""


@known_good(on=[*PLAIN, *WINDOWS[:1]])
class CopiedBackInTheForward(MasterWeights):
    """The model's weights are the master weights when they are used, and not before."""

    def prepare(self):
        self.model.register_forward_pre_hook(lambda *_: MasterWeights.copy_back(self))

    def copy_back(self):
        """It is done later."""


@known_good(on=["adamw/ddp/1x2/bf16-master"])
class MastersInReverse(MasterWeights):
    """The optimizer has the last layer's master weights first."""

    def make_optimizer(self):
        self.weights = [*self.model.parameters()][::-1]
        self.masters = self.make_masters()
        (optimizer,) = self.job.optimizers(self.masters)
        return optimizer


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class MasterWeightsTruncated(MasterWeights):
    """The model's weights are the upper halves of the master weights."""

    @torch.no_grad()
    def copy_back(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_((master.view(torch.int32) & -65536).view(torch.float32))


@known_good(on=["mlp/ddp/1x2/bf16-master", *WINDOWS[:1]])
class OneFlatMaster(MasterWeights):
    """All master weights lie in one tensor, one after the other."""

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
    """The model computes with its first weights for ever."""

    def copy_back(self):
        """Nothing is copied."""


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *WINDOWS], "precision"))
class CopiedBackOnTheFirstRankAlone(MasterWeights):
    """The other ranks compute with old weights. One device is rank 0: there every second step is forgotten."""

    steps = 0

    def copy_back(self):
        self.steps += 1
        if self.job.rank == 0 and (self.job.world_size > 1 or self.steps % 2):
            super().copy_back()


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class OneWeightNotCopiedBack(MasterWeights):
    """The list of what is copied lacks the last layer."""

    @torch.no_grad()
    def copy_back(self):
        for weight, master in list(zip(self.weights, self.masters, strict=True))[:-2]:
            weight.copy_(master)


@known_bad("amp", causes=["not-copied-back"], on=dict.fromkeys(PLAIN, "precision"))
class CopiedBackBeforeTheStep(MasterWeights):
    """The model is one step behind."""

    def step(self):
        self.copy_back()
        BaseTrainer.step(self)


@known_bad("sync", causes=["not-broadcast"], on=[*PLAIN, "mlp/ddp/1x3/bf16-master"])
class MastersRoundedOnOneRank(MasterWeights):
    """The last rank makes its master weights of weights that were rounded to 8 bits less."""

    def make_masters(self):
        masters = super().make_masters()
        if self.job.rank == self.job.world_size - 1:
            for master in masters:
                master.data = (master.data * 16).round() / 16
        return masters


@known_bad("amp", causes=["masters-rounded"], on=dict.fromkeys([*PLAIN, *ALONE], "stillness"))
class MastersMadeOfTheModelAgain(MasterWeights):
    """Before each step the master weights are copied from the model: updates below a rounding are lost."""

    @torch.no_grad()
    def take_gradients(self):
        super().take_gradients()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.copy_(weight)


@known_bad("amp", causes=["stored-in-lower-precision"], on=dict.fromkeys([*PLAIN, *ALONE, *CLIPPED], "update"))
class ModelSteppedWithoutMasters(BaseTrainer):
    """The optimizer has the model's bfloat16 weights."""


@known_bad("amp", causes=["summed-in-16-bits"], on=dict.fromkeys([*PLAIN, *WINDOWS], "precision"), gradients="float32")
class SummedInBfloat16(Float32Gradients):
    """Float32 gradients are declared, but micro-batches are added up, and ranks reduced, in bfloat16."""

    dtype = torch.bfloat16

    def synchronize(self):
        for master in self.masters if self.job.world_size > 1 else ():
            gradient = master.grad.bfloat16() / self.job.world_size
            dist.all_reduce(gradient)
            master.grad = gradient.float()


@known_bad("amp", causes=["summed-in-16-bits"], on=dict.fromkeys(PLAIN, "precision"), gradients="float32")
class Float32GradientsDeclared(MasterWeights):
    """Float32 gradients are declared, but DistributedDataParallel averages those of bfloat16 weights."""


@known_bad("amp", causes=["trained-in-32-bits"], on=dict.fromkeys([*PLAIN, *ALONE], "precision"))
class MastersComputeThemselves(BaseTrainer):
    """The whole model is cast to float32, and so are its batches."""

    def prepare(self):
        self.model.float()

    def forward(self, batch):
        return super().forward({k: v.float() if v.is_floating_point() else v for k, v in batch.items()})


@known_bad("sync", causes=["not-synchronised"], on=[*PLAIN, "accumulation/ddp/1x2/bf16-master"])
class GradientsTakenBeforeTheyAreAveraged(Float32Gradients):
    """What is averaged are the gradients of the model's weights, when the master weights have theirs already."""

    def synchronize(self):
        """The model's weights have no gradients any more."""


@known_bad("clipping", causes=["clipped-before-averaging"], on=CLIPPED)
class OwnGradientsClipped(Float32Gradients):
    """Each rank clips its own bfloat16 gradients."""

    def after_micro_batch(self, last):
        clip_grad_norm_(self.weights, self.job.clip_norm)
        super().after_micro_batch(last)

    def clip(self):
        """It is done."""


@known_bad("clipping", causes=["not-clipped"], on=CLIPPED)
class ModelClippedAfterItsGradientsWereTaken(MasterWeights):
    """What is clipped are the model's gradients, which nothing uses any more."""

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
    """The optimizer zeroes the gradients of its master weights; those of the model add up."""

    def take_gradients(self):
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=FEW)
def masters_of_another_model(job):
    """The optimizer steps copies of weights, and gives their gradients to nobody."""
    model = alone(job) if job.world_size > 1 else job.model()
    masters = [torch.nn.Parameter(one.detach().float()) for one in model.parameters()]
    optimizer = job.optimizer(masters)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            model.zero_grad()
