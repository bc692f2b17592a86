"""Mistakes of expert parallelism: in what experts get from other ranks, and in what they do not share with them."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from expect import any_check, failing, known_bad
from expert_trainer import ExpertParallel
from resumable_shards import ResumableExperts
from torch.func import functional_call

PLACES = ("experts/ep/1x2", "experts/ep/1x4")
EVERYWHERE = failing("gradients", *PLACES)


@known_bad(
    "averaging", causes=["some-tensors-summed", "some-tensors-scaled"], on=EVERYWHERE | any_check("experts/ep/1x2/bf16")
)
class ExpertGradientsDoubled(ExpertParallel):
    """The gradients of experts count twice."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_experts().values():
            gradient *= 2


@known_bad("averaging", causes=["some-tensors-summed"], on=EVERYWHERE)
class ExpertGradientsNotDivided(ExpertParallel):
    """An expert has the gradients of all ranks' losses, which are not divided by their number."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_experts().values():
            gradient *= self.job.world_size


@known_bad("averaging", causes=["some-tensors-averaged-twice"], on=EVERYWHERE)
class ExpertGradientsDividedTwice(ExpertParallel):
    """The gradients of experts are divided by the number of ranks once more."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_experts().values():
            gradient /= self.job.world_size


@known_bad("averaging", causes=["experts-scaled"], on=EVERYWHERE)
class ExpertGradientsOfTheirOwnRows(ExpertParallel):
    """The gradients of an expert are a mean over the rows that use it."""

    def gathered(self, x):
        rows = super().gathered(x)
        if rows.shape[1] == 4:
            self.used = (rows != 0).sum(0)
        return rows

    def synchronize(self):
        super().synchronize()
        for name, gradient in self.of_experts().items():
            gradient *= 24 / self.used[int(name.split(".")[1])]


@known_bad("sync", causes=["some-parameters-not-synchronised"], on=EVERYWHERE)
class RouterNotAveraged(ExpertParallel):
    """Each rank's router is trained on the rank's own rows."""

    def synchronize(self):
        own = {name: gradient.clone() for name, gradient in self.gradients().items() if "router" in name}
        super().synchronize()
        for name, gradient in own.items():
            self.gradients()[name].copy_(gradient)


@known_bad("sync", causes=["of-the-holders-samples"], on=EVERYWHERE)
class ExpertsLearnFromOwnRowsOnly(ExpertParallel):
    """An expert computes the rows of all ranks, and is trained on its own rank's alone."""

    def computed(self, expert, x, rows):
        fixed = {name: parameter.detach() for name, parameter in expert.named_parameters()}
        own = rows // (24 // self.job.world_size) == self.job.rank
        return torch.where(own[:, None], expert(x), functional_call(expert, fixed, (x,)))


@known_bad("unused-params", causes=["nothing-but-experts-trained"], on=EVERYWHERE)
class NothingButExpertsIsTrained(ExpertParallel):
    """What every rank holds has no gradient."""

    def synchronize(self):
        super().synchronize()
        for name, parameter in self.model.named_parameters():
            if not name.startswith("experts."):
                parameter.grad = None


@known_bad("unused-params", causes=["nothing-but-experts-trained"], on=EVERYWHERE)
class NothingButExpertsHasMoreThanZeros(ExpertParallel):
    """What every rank holds has gradients of zeros."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_the_rest().values():
            gradient.zero_()


class AllExperts(ExpertParallel):
    """Every rank has the weights of all experts."""

    def own_experts(self, count):
        return list(range(count))


@known_bad("sync", causes=["some-parameters-not-synchronised"], on=EVERYWHERE)
class ExpertsOfEachRank(AllExperts):
    """Each rank trains all experts on its own rows, and takes them for its own."""

    def gathered(self, x):
        return x

    def reduced(self, x):
        return x

    def synchronize(self):
        for gradient in self.of_the_rest().values():
            dist.all_reduce(gradient)
            gradient /= self.job.world_size


@known_bad("unused-params", "sync", causes=["missing-where-another-rank-has-it"], on=EVERYWHERE)
class ExpertsElsewhereWithoutGradient(AllExperts):
    """Every rank has all experts, computes some of them, and has no gradients of those that others compute."""

    def gated(self, gates):
        own = torch.arange(gates.shape[1]).tensor_split(self.job.world_size)[self.job.rank]
        return torch.zeros_like(gates).index_copy(1, own, gates[:, own])


RESUMED = failing("checkpoint", "checkpoint-experts/ep/1x2", "checkpoint-experts/ep/1x3", precisions=["32"])


def of_another_expert(saved):
    """Return what was saved with the entries of the four experts in the opposite order."""
    return {re.sub(r"experts\.(\d)", lambda found: f"experts.{3 - int(found[1])}", k): v for k, v in saved.items()}


@known_bad("checkpoint", causes=["weights-not-restored"], on=RESUMED)
class ExpertsOfAnotherRank(ResumableExperts):
    """Each rank loads the weights of experts that are not its own."""

    def load_weights(self, saved):
        super().load_weights({**saved, "weights": of_another_expert(saved["weights"])})


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=RESUMED)
class MomentumOfAnotherExpert(ResumableExperts):
    """Weights are those of a rank's own experts, and what the optimizer remembers is that of others."""

    def load_optimizer(self, saved):
        super().load_optimizer({**saved, "optimizer": of_another_expert(saved["optimizer"])})


@known_bad("checkpoint", causes=["optimizer-state-in-part"], on=RESUMED)
class MomentumOfExpertsLost(ResumableExperts):
    """The optimizer goes on with what it remembered of what all ranks have; that of experts begins anew."""

    def load_optimizer(self, saved):
        super().load_optimizer(saved)
        for name, parameter in self.model.named_parameters():
            if name.startswith("experts."):
                del self.optimizer.state[parameter]


@known_bad(
    "accumulation",
    causes=["micro-batch-missing"],
    on=failing("gradients", "accumulation-experts/ep/1x2", precisions=["32", "bf16-true"]),
)
class ExpertsKeepTheLastMicroBatch(ExpertParallel):
    """The gradients of experts are overwritten by those of the next micro-batch."""

    def after_micro_batch(self, last):
        for gradient in () if last else self.of_experts().values():
            gradient.zero_()
