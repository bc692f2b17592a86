"""Mistakes of expert parallelism: in the gradients of experts and of the router, in clipping, and in checkpoints."""

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
    """Doubles the gradients of experts."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_experts().values():
            gradient *= 2


@known_bad("averaging", causes=["some-tensors-summed"], on=EVERYWHERE)
class ExpertGradientsNotDivided(ExpertParallel):
    """Does not divide the gradients of experts by the number of ranks."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_experts().values():
            gradient *= self.job.world_size


@known_bad("averaging", causes=["some-tensors-averaged-twice"], on=EVERYWHERE)
class ExpertGradientsDividedTwice(ExpertParallel):
    """Divides the gradients of experts by the number of ranks twice."""

    def synchronize(self):
        super().synchronize()
        for gradient in self.of_experts().values():
            gradient /= self.job.world_size


@known_bad("averaging", causes=["experts-scaled"], on=EVERYWHERE)
class ExpertGradientsOfTheirOwnRows(ExpertParallel):
    """Averages an expert's gradients over the rows routed to it instead of over all rows."""

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
    """Does not average the router's gradients, so each rank trains it on its own rows."""

    def synchronize(self):
        own = {name: gradient.clone() for name, gradient in self.gradients().items() if "router" in name}
        super().synchronize()
        for name, gradient in own.items():
            self.gradients()[name].copy_(gradient)


@known_bad("sync", causes=["of-the-holders-samples"], on=EVERYWHERE)
class ExpertsLearnFromOwnRowsOnly(ExpertParallel):
    """Experts compute the rows of all ranks, but get gradients only from their own rank's rows."""

    def computed(self, expert, x, rows):
        fixed = {name: parameter.detach() for name, parameter in expert.named_parameters()}
        own = rows // (24 // self.job.world_size) == self.job.rank
        return torch.where(own[:, None], expert(x), functional_call(expert, fixed, (x,)))


@known_bad("unused-params", causes=["nothing-but-experts-trained"], on=EVERYWHERE)
class NothingButExpertsIsTrained(ExpertParallel):
    """Removes the gradients of all parameters but the experts'."""

    def synchronize(self):
        super().synchronize()
        for name, parameter in self.model.named_parameters():
            if not name.startswith("experts."):
                parameter.grad = None


@known_bad("unused-params", causes=["nothing-but-experts-trained"], on=EVERYWHERE)
class NothingButExpertsHasMoreThanZeros(ExpertParallel):
    """Zeroes the gradients of all parameters but the experts'."""

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
    """Each rank trains all experts on its own rows, and does not average their gradients."""

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
    """Every rank has all experts, but gets gradients only for those that it computes."""

    def gated(self, gates):
        own = torch.arange(gates.shape[1]).tensor_split(self.job.world_size)[self.job.rank]
        return torch.zeros_like(gates).index_copy(1, own, gates[:, own])


RESUMED = failing("checkpoint", "checkpoint-experts/ep/1x2", "checkpoint-experts/ep/1x3", precisions=["32"])


def of_another_expert(saved):
    """Return the saved entries with the four experts in reverse order."""
    return {re.sub(r"experts\.(\d)", lambda found: f"experts.{3 - int(found[1])}", k): v for k, v in saved.items()}


@known_bad("checkpoint", causes=["weights-not-restored"], on=RESUMED)
class ExpertsOfAnotherRank(ResumableExperts):
    """Each rank loads the weights of other experts than its own."""

    def load_weights(self, saved):
        super().load_weights({**saved, "weights": of_another_expert(saved["weights"])})


@known_bad("checkpoint", causes=["optimizer-state-altered"], on=RESUMED)
class MomentumOfAnotherExpert(ResumableExperts):
    """Loads the weights of the right experts, but the optimizer state of others."""

    def load_optimizer(self, saved):
        super().load_optimizer({**saved, "optimizer": of_another_expert(saved["optimizer"])})


@known_bad("checkpoint", causes=["optimizer-state-in-part"], on=RESUMED)
class MomentumOfExpertsLost(ResumableExperts):
    """Restores the optimizer state of all parameters but the experts'."""

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
    """Overwrites the gradients of experts with each micro-batch instead of accumulating them."""

    def after_micro_batch(self, last):
        for gradient in () if last else self.of_experts().values():
            gradient.zero_()
