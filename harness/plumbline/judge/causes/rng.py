"""Why random numbers are not random: hypotheses about generators that are seeded alike, or set back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, TraceCase, holds
from plumbline.judge.oracle.dropout_masks import MaskPosition

Pair = tuple[MaskPosition, MaskPosition]
"""Two masks that are alike, in the order in which the first of their ranks drew them."""


class NothingDrawnCase(TraceCase):
    """A trace in which a layer drew no mask."""


class RedrawnCase(TraceCase):
    """A trace in which a backward recomputed activations with other masks than the forward's."""


@dataclass(frozen=True, eq=False)
class KeptShareCase(CountedCase):
    """Masks in which another share of units is kept than one half."""

    share: float


@dataclass(frozen=True, eq=False)
class StreamCase(CountedCase):
    """Two streams of random numbers, each of a (rank, device), that are the same with a lag."""

    left: tuple[int, int]
    right: tuple[int, int]


@dataclass(frozen=True, eq=False)
class AlikeMasksCase(TraceCase):
    """A trace in which masks are alike: all pairs of them."""

    pairs: Sequence[Pair]


MissingHypothesis = Hypothesis[NothingDrawnCase, Match]
RedrawnHypothesis = Hypothesis[RedrawnCase, Match]
ShareHypothesis = Hypothesis[KeptShareCase, Match]
StreamHypothesis = Hypothesis[StreamCase, Match]
MaskHypothesis = Hypothesis[AlikeMasksCase, Match]
MaskPrediction = Callable[[AlikeMasksCase], Iterator[Match]]


def _first(pairs: Iterable[Pair]) -> Match:
    """Return the step and the rank at which it shows first."""
    latest = min((max(pair, key=lambda place: (place.step, place.rank)) for pair in pairs), key=lambda p: p.step)
    return Match(latest.step, latest.rank, {"step": latest.step})


def _if_any(chosen: Callable[[AlikeMasksCase], Iterable[Pair]]) -> MaskPrediction:
    """Return the prediction that there are pairs of some kind."""

    def predict(case: AlikeMasksCase) -> Iterator[Match]:
        if own := list(chosen(case)):
            yield _first(own)

    return predict


def _within_a_forward(case: AlikeMasksCase) -> list[Pair]:
    return [(a, b) for a, b in case.pairs if replace(a, layer=b.layer, position=b.position) == b]


def _in_one_layer(case: AlikeMasksCase) -> list[Pair]:
    own = _within_a_forward(case)
    return own if all(a.layer == b.layer for a, b in own) else []


def _between_ranks(case: AlikeMasksCase) -> dict[tuple[int, int], list[Pair]]:
    """Return the pairs that are alike in the same place of two ranks, by those ranks."""
    between: dict[tuple[int, int], list[Pair]] = {}
    for a, b in case.pairs:
        if a.rank != b.rank and replace(a, rank=b.rank) == b:
            between.setdefault((min(a.rank, b.rank), max(a.rank, b.rank)), []).append((a, b))
    return between


def _all_ranks(from_the_start: bool) -> MaskPrediction:
    """Return the prediction that all ranks draw alike, from the first step on or later."""

    def predict(case: AlikeMasksCase) -> Iterator[Match]:
        between, world = _between_ranks(case), case.analysis.world
        if world > 1 and set(between) == set(combinations(range(world), 2)):
            match = _first(pair for own in between.values() for pair in own)
            if (match.step == 0) == from_the_start:
                yield match

    return predict


def _some_ranks(number: Callable[[int, int], int] | None = None) -> MaskPrediction:
    """Return the prediction that ranks draw alike that have the same number, or any.

    ``number`` takes a rank and the number of ranks on a node.
    """

    def predict(case: AlikeMasksCase) -> Iterator[Match]:
        between, nodes = _between_ranks(case), case.analysis.cell.topology.num_nodes
        on_node = case.analysis.world // nodes
        by_number = (
            nodes > 1 and on_node > 0 and all(number(a, on_node) == number(b, on_node) for a, b in between)
            if number
            else True
        )
        if between and by_number:
            yield _first(pair for own in between.values() for pair in own)

    return predict


def _local_rank(rank: int, on_node: int) -> int:
    return rank % on_node


def _node_rank(rank: int, on_node: int) -> int:
    return rank // on_node


def _between_devices(case: AlikeMasksCase) -> list[Pair]:
    return [(a, b) for a, b in case.pairs if a.device != b.device and replace(a, device=b.device) == b]


def _between_micro_batches(case: AlikeMasksCase) -> list[Pair]:
    return [
        (a, b) for a, b in case.pairs if a.micro_batch != b.micro_batch and replace(a, micro_batch=b.micro_batch) == b
    ]


def _between_steps(case: AlikeMasksCase) -> list[Pair]:
    return [(a, b) for a, b in case.pairs if a.step != b.step and replace(a, step=b.step) == b]


def _whole_epochs_apart(case: AlikeMasksCase) -> list[Pair]:
    own, epoch = _between_steps(case), case.analysis.epochs.windows
    return own if all((a.step - b.step) % epoch == 0 for a, b in own) else []


def _other_ranks_elsewhere(case: AlikeMasksCase) -> list[Pair]:
    return [(a, b) for a, b in case.pairs if a.rank != b.rank]


NOTHING_DRAWN = (
    MissingHypothesis("nothing-drawn", "rng", holds(lambda case: True),
        "the model's own layer did not draw",
        "is it the job's model that is trained, with its own layers?", 190),
)  # fmt: skip

REDRAWN = (
    RedrawnHypothesis("masks-drawn-anew-in-the-backward", "rng", holds(lambda case: True),
        "activations are recomputed with other random numbers",
        "is the generator's state kept for the recomputation?", 190),
)  # fmt: skip

KEPT_SHARE = (
    ShareHypothesis("never-drops", "rng", holds(lambda case: case.share == 1),
        "nothing is dropped, as in evaluation mode",
        "is model.train() called?", 190),
    ShareHypothesis("drops-everything", "rng", holds(lambda case: case.share == 0),
        "everything is dropped",
        "how are the masks made?", 180),
    ShareHypothesis("drops-another-share", "rng", holds(lambda case: 0 < case.share < 1),
        "another share of the units is dropped",
        "is the rate of dropout another one, or are masks combined?", 170),
)  # fmt: skip

STREAMS = (
    StreamHypothesis("drawn-again", "rng", holds(lambda case: case.left == case.right),
        "a generator draws the same numbers again",
        "was its state set back?", 190),
    StreamHypothesis("a-rank-lags", "rng", holds(lambda case: case.left != case.right),
        "one generator draws the numbers of another one, with a lag between them",
        "seed generators differently instead of advancing them", 180),
)  # fmt: skip

ALIKE_MASKS = (
    MaskHypothesis("one-mask-for-several-samples", "rng", _if_any(_in_one_layer),
        "several samples of a forward have the same mask",
        "draw a mask for each sample", 190),
    MaskHypothesis("layers-drop-alike", "rng", _if_any(_within_a_forward),
        "several layers have the same mask in a forward",
        "is a generator seeded in every layer?", 185),
    MaskHypothesis("one-seed-on-all-ranks", "rng", _all_ranks(from_the_start=True),
        "all ranks draw the same masks from the first step on",
        "seed each rank's generator with seed + rank", 180),
    MaskHypothesis("one-state-on-all-ranks", "rng", _all_ranks(from_the_start=False),
        "all ranks draw the same masks from step {step} on",
        "what sets the generators of all ranks to the same state?", 175),
    MaskHypothesis("seeded-by-local-rank", "rng", _some_ranks(_local_rank),
        "ranks with the same local rank draw the same masks",
        "is LOCAL_RANK used where RANK is meant, in a seed?", 170),
    MaskHypothesis("seeded-by-node", "rng", _some_ranks(_node_rank),
        "the ranks of a node draw the same masks",
        "is the node's number used where RANK is meant, in a seed?", 165),
    MaskHypothesis("some-ranks-seeded-alike", "rng", _some_ranks(),
        "some ranks draw the same masks",
        "what are the ranks' generators seeded with?", 160),
    MaskHypothesis("replicas-draw-alike", "rng", _if_any(_between_devices),
        "the devices of a process draw the same masks",
        "give each device a generator with a seed of its own", 150),
    MaskHypothesis("seeded-anew-every-micro-batch", "rng", _if_any(_between_micro_batches),
        "the micro-batches of a step have the same masks",
        "is a generator seeded again for each micro-batch?", 140),
    MaskHypothesis("seeded-anew-every-epoch", "rng", _if_any(_whole_epochs_apart),
        "each epoch draws the masks of the one before",
        "is a generator seeded again, or its state set back, in each epoch?", 130),
    MaskHypothesis("seeded-anew-every-step", "rng", _if_any(_between_steps),
        "several steps draw the same masks",
        "is a generator seeded again, or its state set back, between them?", 120),
    MaskHypothesis("a-rank-lags", "rng", _if_any(_other_ranks_elsewhere),
        "a rank draws the masks that another rank drew before",
        "seed generators differently instead of advancing them", 110),
    MaskHypothesis("drawn-again", "rng", _if_any(lambda case: case.pairs),
        "a generator draws the same masks again",
        "was its state set back?", 105),
)  # fmt: skip
