"""Wrong weights: from another start, moved too far, not at all, or behind the optimizer's back."""

from __future__ import annotations

import torch
import torch.distributed
from right import ByHand, Trainer, declare


class BiasesNotBroadcast(ByHand):
    def wrap(self, model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if self.job.rank == 1 and name.endswith("bias"):
                    parameter += 0.01
        return model


class BuffersNeverBroadcast(ByHand):
    """Every rank keeps the running statistics of its own samples."""

    def broadcast_buffers(self):
        pass


class WeightsOfItsOwn(Trainer):
    """The model is initialised anew; DistributedDataParallel makes it the same on all ranks."""

    def wrap(self, model):
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return super().wrap(model)


class WrongLearningRate(Trainer):
    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer


class SteppedTwice(Trainer):
    def step(self):
        super().step()
        self.optimizer.step()


class SharedMemory(Trainer):
    """Spawned ranks that share parameters: every rank's step moves everybody's weights."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.register_step_pre_hook(self.remember)
        optimizer.register_step_post_hook(self.move_again)
        return optimizer

    def remember(self, *_):
        self.before = [parameter.detach().clone() for parameter in self.model.parameters()]

    def move_again(self, *_):
        with torch.no_grad():
            for old, parameter in zip(self.before, self.model.parameters(), strict=True):
                parameter += (self.job.world_size - 1) * (parameter - old)


class ParameterMissing(Trainer):
    def make_optimizer(self):
        return self.job.optimizer(list(self.model.parameters())[:-1])


class MomentumForgotten(Trainer):
    """A new optimizer every epoch."""

    def begin_epoch(self, epoch):
        super().begin_epoch(epoch)
        self.optimizer = self.make_optimizer()


class HiddenDecay(Trainer):
    """Between two steps the weights shrink a little, without the optimizer."""

    def zero_grad(self):
        super().zero_grad()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter *= 0.999


class ShrunkAfterTheLastStep(Trainer):
    """What is left behind is not what was trained."""

    def fit(self):
        super().fit()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter *= 0.5


class ZeroGradient(Trainer):
    def backward(self, loss):
        super().backward(loss * 0)


class ZeroedBeforeTheStep(Trainer):
    def step(self):
        self.optimizer.zero_grad()
        super().step()


class Frozen(Trainer):
    """The gradients are right, the weights do not move."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer


class InEvaluation(Trainer):
    """BatchNorm with the running statistics instead of the batch's."""

    def begin_epoch(self, epoch):
        super().begin_epoch(epoch)
        self.wrapped.eval()


class EveryoneAlone(Trainer):
    """The launcher's variables are ignored: every process is a world of one."""

    def join(self):
        pass

    def wrap(self, model):
        return model


class NeverSteps(Trainer):
    def fit(self):
        pass


subjects = [
    declare("biases-not-broadcast", BiasesNotBroadcast),
    declare("buffers-never-broadcast", BuffersNeverBroadcast),
    declare("weights-of-its-own", WeightsOfItsOwn),
    declare("wrong-learning-rate", WrongLearningRate),
    declare("stepped-twice", SteppedTwice),
    declare("shared-memory", SharedMemory),
    declare("parameter-missing", ParameterMissing),
    declare("momentum-forgotten", MomentumForgotten),
    declare("hidden-decay", HiddenDecay),
    declare("shrunk-after-the-last-step", ShrunkAfterTheLastStep),
    declare("zero-gradient", ZeroGradient),
    declare("zeroed-before-the-step", ZeroedBeforeTheStep),
    declare("frozen", Frozen),
    declare("in-evaluation", InEvaluation),
    declare("everyone-alone", EveryoneAlone),
    declare("never-steps", NeverSteps),
]
