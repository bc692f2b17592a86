"""Why random numbers are not independent: hypotheses about generators that are seeded alike, or reset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, TraceCase, holds, register
from plumbline.judge.oracle.dropout_masks import MaskPosition

Pair = tuple[MaskPosition, MaskPosition]
"""Two masks that are alike, ordered by rank, and on one rank in the order in which it drew them."""


class NothingDrawnCase(TraceCase):
    """A trace in which a layer drew no mask."""


class RedrawnCase(TraceCase):
    """A trace in which a backward recomputed activations with other masks than the forward's."""


@dataclass(frozen=True, eq=False)
class KeptShareCase(CountedCase):
    """Masks that keep a share of units other than one half."""

    share: float


@dataclass(frozen=True, eq=False)
class StreamCase(CountedCase):
    """Two streams of random numbers, each of one (rank, device), that are equal up to a lag."""

    left: tuple[int, int]
    right: tuple[int, int]


@dataclass(frozen=True, eq=False)
class AlikeMasksCase(TraceCase):
    """A trace in which masks are alike; ``pairs`` has all pairs of such masks."""

    pairs: Sequence[Pair]


MissingHypothesis = Hypothesis[NothingDrawnCase, Match]
RedrawnHypothesis = Hypothesis[RedrawnCase, Match]
ShareHypothesis = Hypothesis[KeptShareCase, Match]
StreamHypothesis = Hypothesis[StreamCase, Match]
MaskHypothesis = Hypothesis[AlikeMasksCase, Match]
MaskPrediction = Callable[[AlikeMasksCase], Iterator[Match]]


def _first(pairs: Iterable[Pair]) -> Match:
    latest = min((max(pair, key=lambda place: (place.step, place.rank)) for pair in pairs), key=lambda p: p.step)
    return Match(latest.step, latest.rank, {"step": latest.step})


def _if_any(chosen: Callable[[AlikeMasksCase], Iterable[Pair]]) -> MaskPrediction:

    def predict(case: AlikeMasksCase) -> Iterator[Match]:
        if own := list(chosen(case)):
            yield _first(own)

    return predict


def _alike_but_for(case: AlikeMasksCase, *fields: str) -> list[Pair]:
    """Return the pairs whose places differ only in these fields."""
    return [(a, b) for a, b in case.pairs if replace(a, **{name: getattr(b, name) for name in fields}) == b]


def _within_a_forward(case: AlikeMasksCase) -> list[Pair]:
    return _alike_but_for(case, "layer", "position")


def _in_one_layer(case: AlikeMasksCase) -> list[Pair]:
    own = _within_a_forward(case)
    return own if all(a.layer == b.layer for a, b in own) else []


def _between_ranks(case: AlikeMasksCase) -> dict[tuple[int, int], list[Pair]]:
    between: dict[tuple[int, int], list[Pair]] = {}
    for a, b in _alike_but_for(case, "rank"):
        between.setdefault((min(a.rank, b.rank), max(a.rank, b.rank)), []).append((a, b))
    return between


def _all_ranks(from_the_start: bool) -> MaskPrediction:
    def predict(case: AlikeMasksCase) -> Iterator[Match]:
        between, world = _between_ranks(case), case.analysis.world
        if world > 1 and set(between) == set(combinations(range(world), 2)):
            match = _first(pair for own in between.values() for pair in own)
            if (match.step == 0) == from_the_start:
                yield match

    return predict


def _some_ranks(number: Callable[[int, int], int] | None = None) -> MaskPrediction:
    """Return the prediction that ranks with an equal ``number`` draw the same masks; without it, that any ranks do.

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


def _whole_epochs_apart(case: AlikeMasksCase) -> list[Pair]:
    own, epoch = _alike_but_for(case, "step"), case.analysis.epochs.windows
    return own if all((a.step - b.step) % epoch == 0 for a, b in own) else []


register(
    NothingDrawnCase,
    MissingHypothesis("nothing-drawn", "rng", holds(lambda case: True),
        "the layer of job.model() drew nothing",
        "train the model that job.model() returns, with its own layers", 190),
)  # fmt: skip

register(
    RedrawnCase,
    RedrawnHypothesis("masks-drawn-anew-in-the-backward", "rng", holds(lambda case: True),
        "activations are recomputed with different random numbers",
        "restore the generator's state for the recomputation", 190),
)  # fmt: skip

register(
    KeptShareCase,
    ShareHypothesis("never-drops", "rng", holds(lambda case: case.share == 1),
        "nothing is dropped, as in evaluation mode",
        "call model.train()", 190),
    ShareHypothesis("drops-everything", "rng", holds(lambda case: case.share == 0),
        "everything is dropped",
        "check how the masks are made", 180),
    ShareHypothesis("drops-another-share", "rng", holds(lambda case: 0 < case.share < 1),
        "a different share of the units is dropped",
        "check the dropout rate, and whether masks are combined", 170),
)  # fmt: skip

register(
    StreamCase,
    StreamHypothesis("drawn-again", "rng", holds(lambda case: case.left == case.right),
        "a generator draws the same numbers again",
        "check what resets its state", 190),
    StreamHypothesis("a-rank-lags", "rng", holds(lambda case: case.left != case.right),
        "one generator draws the same numbers as another, with a lag",
        "seed generators differently instead of advancing them", 180),
)  # fmt: skip

register(
    AlikeMasksCase,
    MaskHypothesis("one-mask-for-several-samples", "rng", _if_any(_in_one_layer),
        "several samples of a forward have the same mask",
        "draw a mask for each sample", 190),
    MaskHypothesis("layers-drop-alike", "rng", _if_any(_within_a_forward),
        "several layers have the same mask in a forward",
        "do not seed a generator in every layer", 185),
    MaskHypothesis("one-seed-on-all-ranks", "rng", _all_ranks(from_the_start=True),
        "all ranks draw the same masks from the first step on",
        "seed each rank's generator with seed + rank", 180),
    MaskHypothesis("one-state-on-all-ranks", "rng", _all_ranks(from_the_start=False),
        "all ranks draw the same masks from step {step} on",
        "check what sets the generators of all ranks to the same state", 175),
    MaskHypothesis("seeded-by-local-rank", "rng", _some_ranks(lambda rank, on_node: rank % on_node),
        "ranks with the same local rank draw the same masks",
        "use RANK instead of LOCAL_RANK in the seed", 170),
    MaskHypothesis("seeded-by-node", "rng", _some_ranks(lambda rank, on_node: rank // on_node),
        "the ranks of a node draw the same masks",
        "use RANK instead of the node's rank in the seed", 165),
    MaskHypothesis("some-ranks-seeded-alike", "rng", _some_ranks(),
        "some ranks draw the same masks",
        "check what the ranks' generators are seeded with", 160),
    MaskHypothesis("replicas-draw-alike", "rng", _if_any(lambda case: _alike_but_for(case, "device")),
        "the devices of a process draw the same masks",
        "seed the generator of each device differently", 150),
    MaskHypothesis("seeded-anew-every-micro-batch", "rng",
        _if_any(lambda case: _alike_but_for(case, "micro_batch")),
        "the micro-batches of a step have the same masks",
        "do not seed the generator again for each micro-batch", 140),
    MaskHypothesis("seeded-anew-every-epoch", "rng", _if_any(_whole_epochs_apart),
        "each epoch draws the masks of the previous one",
        "do not seed the generator again, or reset its state, in each epoch", 130),
    MaskHypothesis("seeded-anew-every-step", "rng", _if_any(lambda case: _alike_but_for(case, "step")),
        "several steps draw the same masks",
        "do not seed the generator again, or reset its state, between them", 120),
    MaskHypothesis("a-rank-lags", "rng", _if_any(lambda case: [(a, b) for a, b in case.pairs if a.rank != b.rank]),
        "a rank draws the masks that another rank drew before",
        "seed generators differently instead of advancing them", 110),
    MaskHypothesis("drawn-again", "rng", _if_any(lambda case: case.pairs),
        "a generator draws the same masks again",
        "check what resets its state", 105),
)  # fmt: skip
