"""One mistake for each narrow workload: what that workload is there to expose."""

from __future__ import annotations

import torch
import torch.distributed
from loop import ByHand, Loop, Replicas, declare
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SequentialSampler, Subset


class ShortWindowDividedByTheFullLength(Loop):
    def divisor(self, window):
        return self.job.accumulate


class ShortWindowDropped(Loop):
    def windows(self):
        return [window for window in super().windows() if len(window) == self.job.accumulate]


class TokensOfTheLastMicroBatch(Loop):
    """Summed losses of a window, divided by the number of tokens in its last micro-batch."""

    def micro_batch(self, batch, window, last):
        own, final = batch["real"].sum(), window[-1]["real"].sum()
        self.factor = own / final
        super().micro_batch(batch, window, last)

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * self.factor


class NeverClipped(Loop):
    def clip(self):
        pass


class ClippedBeforeUnscaling(Loop):
    def unscale(self):
        pass


class ClippedBeforeTheAverage(ByHand):
    def synchronize(self):
        self.unscale()
        super().clip()
        super().synchronize()

    def end_of_window(self):
        self.synchronize()
        self.step()
        self.scaler.update()
        self.zero_grad()


class ScheduledOnceAnEpoch(Loop):
    def schedule(self, skipped):
        pass

    def fit(self):
        self.steps = 0
        super().fit()

    def zero_grad(self):
        super().zero_grad()
        self.steps += 1
        if self.steps % self.job_windows == 0:
            self.scheduler.step()

    @property
    def job_windows(self):
        return -(-len(self.loader) // self.job.accumulate)


class ScheduledForEveryMicroBatch(Loop):
    def schedule(self, skipped):
        pass

    def after_micro_batch(self, last):
        self.scheduler.step()


class ScheduledWhenSkipped(Loop):
    def schedule(self, skipped):
        self.scheduler.step()


class MomentsLost(Loop):
    def zero_grad(self):
        super().zero_grad()
        self.optimizer.state.clear()


class OneGroup(Loop):
    """Both parameter groups with the settings of the first."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        return optimizer


class LossTimesWorld(Loop):
    def backward(self, loss):
        super().backward(loss * self.job.world_size)


class EvaluationWipesGradients(Loop):
    def evaluate(self):
        super().evaluate()
        self.zero_grad()


class StaysInEvaluation(Loop):
    def evaluate(self):
        super().evaluate()
        self.model.eval()


class EvaluatesInTraining(Loop):
    def evaluate(self):
        with torch.no_grad():
            self.model(self.job.val_dataset.batch(range(len(self.job.val_dataset))))


class ReportsASum(Loop):
    def report(self, val_loss):
        super().report(val_loss * self.job.world_size)


class AlwaysShuffles(Loop):
    def make_loader(self):
        self.job.shuffle = True
        return super().make_loader()


class ContiguousShards(Loop):
    def make_loader(self):
        size = len(self.job.dataset) // self.job.world_size
        share = Subset(self.job.dataset, range(self.job.rank * size, (self.job.rank + 1) * size))
        sampler = SequentialSampler(share)
        sampler.set_epoch = lambda epoch: None
        return DataLoader(share, batch_size=self.job.batch_size, sampler=sampler)


class TailDropped(Loop):
    def make_loader(self):
        return DataLoader(self.job.dataset, batch_size=self.job.batch_size, sampler=super().make_loader().sampler,
                          drop_last=True)  # fmt: skip


class PaddedToWholeBatches(Loop):
    """The last batch is filled up with samples of the first."""

    def windows(self):
        *whole, (last,) = super().windows()
        size = self.job.batch_size - len(last["index"])
        filled = {name: torch.cat((column, whole[0][0][name][:size])) for name, column in last.items()}
        return [*whole, [filled]]


class NeverDrops(Loop):
    def prepare(self):
        self.model.eval()


class IndexOfAnotherOrder(Loop):
    """A batch whose ``index`` was sorted, and the other columns not."""

    def forward(self, batch):
        return super().forward({**batch, "index": batch["index"].sort().values})


class Untied(Loop):
    """The head gets a copy of the embedding: each of them sees its own half of the gradient."""

    def prepare(self):
        self.model.head.weight = torch.nn.Parameter(self.model.tokens.weight.detach().clone())


class TiedAveragedTwice(ByHand):
    """Parameters are found layer by layer, and the tied one is found twice."""

    def synchronize(self):
        super().synchronize()
        self.model.tokens.weight.grad /= self.job.world_size


class SparseSummed(ByHand):
    def synchronize(self):
        super().synchronize()
        for parameter in self.model.parameters():
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad * self.job.world_size


class SparseLeftOut(ByHand):
    def synchronize(self):
        own = self.model.embedding.weight.grad.clone()
        super().synchronize()
        self.model.embedding.weight.grad = own


class ScalarsSummed(Replicas):
    """0-d outputs are added where they are gathered."""

    def gather(self, outputs):
        joined = super().gather(outputs)
        return joined.sum() if isinstance(joined, torch.Tensor) and not outputs[0].dim() else joined


class FirstDevicesRest(Replicas):
    """What is not at the top of the dict is gathered without a gradient."""

    def gather(self, outputs):
        joined = super().gather(outputs)
        if isinstance(joined, dict):
            joined["rest"] = torch.utils._pytree.tree_map(torch.Tensor.detach, joined["rest"])
        return joined


class Thawed(Loop):
    def prepare(self):
        self.model.requires_grad_(True)


class ZerosForFrozen(ByHand):
    """Frozen weights take part in the all-reduce with zeros, and the optimizer lets them decay."""

    def synchronize(self):
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().synchronize()


class UnusedNotLookedFor(Loop):
    def wrap(self, model):
        torch.distributed.init_process_group(self.job.comm)
        return DistributedDataParallel(model)


class UnusedDividedByTheirUsers(ByHand):
    """Each gradient is averaged over the ranks that have one."""

    def synchronize(self):
        for parameter in self.model.parameters():
            users = torch.tensor(float(parameter.grad is not None))
            torch.distributed.all_reduce(users)
            if users:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(grad)
                parameter.grad = grad / users


class SeededAlike(Loop):
    def prepare(self):
        torch.manual_seed(self.job.seed)


class SecondNeverSteps(Loop):
    def step(self):
        self.optimizer.every[0].step()


class OnlyFirstZeroed(Loop):
    def zero_grad(self):
        self.optimizer.every[0].zero_grad()


class DecidedAlone(ByHand):
    """Each rank unscales its own gradient and skips if that is not finite; the others' average lacks it."""

    def end_of_window(self):
        self.unscale()
        finite = all(bool(p.grad.isfinite().all()) for p in self.model.parameters())
        for parameter in self.model.parameters():
            own = parameter.grad.clone()
            shared = own if finite else torch.zeros_like(own)
            torch.distributed.all_reduce(shared)
            parameter.grad = shared / self.job.world_size if finite else own
        self.step()
        self.scaler.update()
        if self.scheduler is not None:
            self.schedule(skipped=not finite)
        self.zero_grad()


class OverflowIgnored(Loop):
    def step(self):
        self.unscale()
        self.optimizer.step()


MISTAKES = (
    ShortWindowDividedByTheFullLength, ShortWindowDropped, TokensOfTheLastMicroBatch, NeverClipped,
    ClippedBeforeUnscaling, ClippedBeforeTheAverage, ScheduledOnceAnEpoch, ScheduledForEveryMicroBatch,
    ScheduledWhenSkipped, MomentsLost, OneGroup, LossTimesWorld, EvaluationWipesGradients, StaysInEvaluation,
    EvaluatesInTraining, ReportsASum, AlwaysShuffles, ContiguousShards, TailDropped, PaddedToWholeBatches, NeverDrops,
    IndexOfAnotherOrder, Untied, TiedAveragedTwice, SparseSummed, SparseLeftOut, ScalarsSummed, FirstDevicesRest,
    Thawed, SeededAlike, SecondNeverSteps, OnlyFirstZeroed, ZerosForFrozen, UnusedNotLookedFor,
    UnusedDividedByTheirUsers, DecidedAlone, OverflowIgnored,
)  # fmt: skip


def named(trainer):
    """Return the class's name as a subject's: ``NeverDrops`` is ``never-drops``."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in trainer.__name__)[1:]


for right in (Loop, ByHand, Replicas):
    globals()[f"right_{right.__name__}"] = declare(named(right), right)
for mistake in MISTAKES:
    globals()[f"wrong_{mistake.__name__}"] = declare(named(mistake), mistake)
