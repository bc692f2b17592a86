"""Why random numbers are not random: hypotheses about where generators were seeded alike, or set back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from harness.core.finding import Finding
from harness.judge.causes.cause import Cause, explained
from harness.judge.oracle.dropout_masks import MaskPosition
from harness.judge.trace_analysis import TraceAnalysis

Pair = tuple[MaskPosition, MaskPosition]
"""Two masks that are alike, in the order of their tossing on the first of their ranks."""


def explain_absent(finding: Finding) -> Finding:
    """Return a finding about a rank where nothing was drawn with a cause."""
    look = "is it the job's model that is trained, and do its own layers draw?"
    return Cause("nothing-drawn", "rng", look).explain(finding)


def explain_drawn_again(finding: Finding) -> Finding:
    """Return a finding about a backward through other masks than the forward's with a cause."""
    look = "activations are computed once more with other random numbers: is the generator's state kept for that?"
    return Cause("masks-drawn-anew-in-the-backward", "rng", look).explain(finding)


def explain_unfair(finding: Finding, share: float) -> Finding:
    """Return a finding about coins that are not fair with a cause; ``share`` of the units are kept."""
    if share == 1:
        cause = Cause("never-drops", "rng", "it is trained in evaluation mode: is model.train() called?")
    elif share == 0:
        cause = Cause("drops-everything", "rng", "what are the masks made of?")
    else:
        cause = Cause("drops-another-share", "rng", "is the rate of dropout another one, or are masks combined?")
    return cause.explain(finding)


def explain_streams(finding: Finding, left: tuple[int, int], right: tuple[int, int]) -> Finding:
    """Return a finding about two streams, each of a device of a rank, that are one at some lag, with a cause."""
    if left == right:
        look = "a generator tosses the same coins again: was its state set back?"
        return Cause("drawn-again", "rng", look).explain(finding)
    look = "one draws what the other draws, a few numbers later: seed them differently, do not only advance them"
    return Cause("a-rank-lags", "rng", look).explain(finding)


def explain_alike(finding: Finding, pairs: Sequence[Pair], analysis: TraceAnalysis) -> Finding:
    """Return a finding about masks that are alike with a cause: the first hypothesis that the pairs do not refute."""
    return explained(
        finding,
        _within_a_forward(pairs),
        _all_ranks(pairs, analysis),
        _some_ranks(pairs, analysis),
        _devices(pairs),
        _every_micro_batch(pairs),
        _every_epoch(pairs, analysis),
        _every_step(pairs),
        _lag(pairs),
        _again(pairs),
    )


def _where(place: MaskPosition) -> tuple[object, ...]:
    """Return all of a place but its rank: two ranks that are seeded alike toss the same coins in the same place."""
    return place.step, place.micro_batch, place.device, place.layer, place.position


def _first(pairs: Iterable[Pair]) -> dict[str, int]:
    """Return the step and the rank at which it shows first."""
    latest = min((max(pair, key=lambda place: (place.step, place.rank)) for pair in pairs), key=lambda p: p.step)
    return {"step": latest.step, "rank": latest.rank}


def _within_a_forward(pairs: Sequence[Pair]) -> Cause | None:
    own = [(a, b) for a, b in pairs if replace(a, layer=b.layer, position=b.position) == b]
    if not own:
        return None
    if all(a.layer == b.layer for a, b in own):
        return Cause("one-mask-for-several-samples", "rng", "each sample needs a mask of its own", **_first(own))
    return Cause("layers-drop-alike", "rng", "is a generator seeded in every layer?", **_first(own))


def _between_ranks(pairs: Sequence[Pair]) -> dict[tuple[int, int], list[Pair]]:
    """Return the pairs that are alike in the same place of two ranks, by those ranks."""
    between: dict[tuple[int, int], list[Pair]] = {}
    for a, b in pairs:
        if a.rank != b.rank and _where(a) == _where(b):
            between.setdefault((min(a.rank, b.rank), max(a.rank, b.rank)), []).append((a, b))
    return between


def _all_ranks(pairs: Sequence[Pair], analysis: TraceAnalysis) -> Cause | None:
    between = _between_ranks(pairs)
    world = analysis.cell.processes
    if world == 1 or set(between) != set(combinations(range(world), 2)):
        return None
    place = _first(pair for own in between.values() for pair in own)
    if place["step"] == 0:
        look = "all ranks draw the same masks: they are seeded alike; seed each with seed + rank"
        return Cause("one-seed-on-all-ranks", "rng", look, **place)
    look = f"from step {place['step']} on all ranks draw the same masks: what gave them all one generator's state?"
    return Cause("one-state-on-all-ranks", "rng", look, **place)


def _some_ranks(pairs: Sequence[Pair], analysis: TraceAnalysis) -> Cause | None:
    between = _between_ranks(pairs)
    if not between:
        return None
    nodes = analysis.cell.topology.num_nodes
    on_node = analysis.cell.processes // nodes
    place = _first(pair for own in between.values() for pair in own)
    numbers: tuple[tuple[str, str, Callable[[int], int]], ...] = (
        ("seeded-by-local-rank", "is LOCAL_RANK taken for RANK where generators are seeded?", lambda r: r % on_node),
        ("seeded-by-node", "is the node's number taken for RANK where generators are seeded?", lambda r: r // on_node),
    )
    for name, look, number in numbers:
        if nodes > 1 and all(number(left) == number(right) for left, right in between):
            return Cause(name, "rng", look, **place)
    return Cause("some-ranks-seeded-alike", "rng", "some ranks draw the same masks: by what are they seeded?", **place)


def _devices(pairs: Sequence[Pair]) -> Cause | None:
    own = [(a, b) for a, b in pairs if a.device != b.device and replace(a, device=b.device) == b]
    if own:
        look = "the devices of a process draw the same masks: give each of them a generator with a seed of its own"
        return Cause("replicas-draw-alike", "rng", look, **_first(own))
    return None


def _every_micro_batch(pairs: Sequence[Pair]) -> Cause | None:
    own = [(a, b) for a, b in pairs if a.micro_batch != b.micro_batch and replace(a, micro_batch=b.micro_batch) == b]
    if own:
        look = "the micro-batches of a step have the same masks: a generator is seeded anew in each"
        return Cause("seeded-anew-every-micro-batch", "rng", look, **_first(own))
    return None


def _steps_apart(pairs: Sequence[Pair]) -> list[Pair]:
    return [(a, b) for a, b in pairs if a.step != b.step and replace(a, step=b.step) == b]


def _every_epoch(pairs: Sequence[Pair], analysis: TraceAnalysis) -> Cause | None:
    epoch = analysis.epochs.windows
    own = _steps_apart(pairs)
    if own and all((a.step - b.step) % epoch == 0 for a, b in own):
        look = "each epoch draws the masks of the one before: a generator is seeded anew, or its state set back"
        return Cause("seeded-anew-every-epoch", "rng", look, **_first(own))
    return None


def _every_step(pairs: Sequence[Pair]) -> Cause | None:
    own = _steps_apart(pairs)
    if own:
        look = "several steps draw the same masks: a generator is seeded anew, or its state set back, between them"
        return Cause("seeded-anew-every-step", "rng", look, **_first(own))
    return None


def _lag(pairs: Sequence[Pair]) -> Cause | None:
    own = [(a, b) for a, b in pairs if a.rank != b.rank]
    if own:
        look = "a rank draws the masks that another drew before: seed them differently, do not only advance them"
        return Cause("a-rank-lags", "rng", look, **_first(own))
    return None


def _again(pairs: Sequence[Pair]) -> Cause:
    look = "a generator draws the same masks again: was its state set back?"
    return Cause("drawn-again", "rng", look, **_first(pairs))
