"""Mistakes of sequence parallelism: in weighting the parts of a sequence, and in what ranks exchange."""

from __future__ import annotations

import torch
from expect import any_check, failing, known_bad
from mesh_trainer import Gathered
from sequence_trainer import SequenceParallel

PLACES = ("transformer/sp/1x2", "lm-tokens/sp/1x3")
EVERYWHERE = failing("gradients", *PLACES)


@known_bad(
    "loss-normalisation",
    causes=["divided-by-ranks-of-the-same-samples"],
    on=EVERYWHERE | any_check("transformer/sp/1x2/bf16"),
)
class DividedBySequenceParallelSize(SequenceParallel):
    """Divides the loss, already divided by the number of all tokens, by the number of ranks again."""

    def count(self, own):
        return super().count(own) * self.job.world_size


@known_bad("loss-normalisation", causes=["multiplied-by-ranks-of-the-same-samples"], on=EVERYWHERE)
class TimesSequenceParallelSize(SequenceParallel):
    """Multiplies the loss, already divided by the number of all tokens, by the number of ranks."""

    def count(self, own):
        return super().count(own) / self.job.world_size


@known_bad(
    "loss-normalisation",
    causes=["means-of-parts-averaged"],
    on=failing("gradients", "lm-tokens/sp/1x2", "lm-tokens/sp/1x3"),
)
class MeanOfThePartsMeans(SequenceParallel):
    """Averages each rank's loss over its own tokens, however few, and then over the ranks."""

    def count(self, own):
        return own * self.job.world_size


@known_bad(
    "loss-normalisation",
    causes=["shares-weighted-wrongly"],
    on=failing("gradients", "lm-tokens/sp/1x2", "lm-tokens/sp/1x3"),
)
class DividedByTheLengthOfASequence(SequenceParallel):
    """Counts padding in the divisor."""

    def loss(self, outputs, batch):
        own = super().loss(outputs, batch)
        return own * batch["real"].sum() / batch["real"].numel()


@known_bad("sync", causes=["parts-of-a-sum"], on=EVERYWHERE | failing("gradients", "transformer/sp/1x4"))
class NothingAdded(SequenceParallel):
    """Does not sum gradients: each rank steps with the gradients of its own tokens."""

    def synchronize(self):
        pass


class SomeAdded(SequenceParallel):
    """Sums the gradients of some parameters only."""

    def gradients(self):
        return {name: value for name, value in super().gradients().items() if self.is_added(name)}


@known_bad("sync", causes=["parts-of-a-sum"], on=failing("gradients", "transformer/sp/1x2", "transformer/sp/1x3"))
class NormsNotAdded(SomeAdded):
    """Does not sum the gradients of normalisations over the parts of a sequence."""

    def is_added(self, name):
        return "norm" not in name


@known_bad("sync", causes=["parts-of-a-sum"], on=EVERYWHERE)
class BiasesNotAdded(SomeAdded):
    """Does not sum the gradients of biases over the parts of a sequence."""

    def is_added(self, name):
        return "bias" not in name


@known_bad("data", causes=["positions-from-zero"], on=failing("gradients", "transformer/sp/1x2", "transformer/sp/1x3"))
class PositionsFromZero(SequenceParallel):
    """Each rank numbers its tokens from zero."""

    def numbers(self):
        return torch.arange(len(self.places))


@known_bad(
    "sync",
    causes=["lost-on-the-way-back"],
    on=failing("gradients", "transformer/sp/1x2", "transformer/sp/1x3", precisions=["32"]),
)
class KeysWithoutTheOthersGradients(SequenceParallel):
    """Gathers keys and values, but drops the gradients of the other ranks' queries."""

    def gathered(self, x):
        return Gathered.apply(x, 1, self.group("sp"), self.length)


@known_bad(
    "sync",
    causes=["parts-not-exchanged"],
    on=failing("gradients", "transformer/sp/1x2", "transformer/sp/1x3", precisions=["32"]),
)
class KeysOfTheOwnPartOnly(SequenceParallel):
    """Queries attend only to the keys of their own part."""

    def gathered(self, x):
        return Gathered.apply(x, 1, self.group("sp"), self.length).detach() * 0 + torch.nn.functional.pad(
            x, (0, 0, int(self.places[0]), self.length - int(self.places[-1]) - 1)
        )
