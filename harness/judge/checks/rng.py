"""Are random numbers random: other ones for every sample, on every device, on every rank, at every step?"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.judge.causes import explain
from harness.judge.causes.rng import AlikeMasksCase, KeptShareCase, NothingDrawnCase, RedrawnCase, StreamCase
from harness.judge.error_outcome import Vacuous
from harness.judge.oracle.dropout_masks import Row, agreements, rows, shifted_agreements, surprise, surprise_limit
from harness.judge.trace_analysis import TraceAnalysis


def rng(analysis: TraceAnalysis) -> Finding | None:
    """No two rows and no two streams of what layers drew have more in common than chance explains; coins are fair.

    Limits follow from the chance of a false alarm and the number of comparisons. None where the model draws nothing.
    """
    layers = [str(layer.draws) for layer in analysis.oracle.model.modules() if getattr(layer, "draws", None)]
    if not layers:
        return None
    if not analysis.moments:
        raise Vacuous("no optimizer step was seen")
    refused = _absent(layers, analysis) or _drawn_again(layers, analysis)
    if refused is not None:
        return refused
    every = list(rows(analysis.trace, layers))
    if not every:
        raise Vacuous("no sample went through the model")
    finding = _unfair_row(every) or _unfair_layer(every) or _alike(every, analysis) or _streams(every)
    return finding or Finding("rng", Outcome.PASSED, f"{len(every)} masks are fair coins, and no two are alike")


def _absent(layers: Sequence[str], analysis: TraceAnalysis) -> Finding | None:
    for trace in analysis.trace.ranks:
        for index, step in enumerate(trace.steps):
            for micro in step.micro_batches:
                layer = next((name for name in layers if len(micro.drawn.get(name, ())) != len(micro.samples)), None)
                if layer is not None:
                    message = f"at step {index} on rank {trace.rank} nothing was drawn for {layer!r}"
                    finding = Finding("rng", Outcome.FAILED, message, step=index, rank=trace.rank)
                    return explain(finding, NothingDrawnCase(analysis))
    return None


def _drawn_again(layers: Sequence[str], analysis: TraceAnalysis) -> Finding | None:
    """Return what is wrong where a backward went through other masks than the forward."""
    for trace in analysis.trace.ranks:
        for index, step in enumerate(trace.steps):
            layer = next(
                (name for name in layers for micro in step.micro_batches if f"{name} again" in micro.drawn), None
            )
            if layer is not None:
                message = f"at step {index} on rank {trace.rank} {layer!r} drew other masks in the backward"
                finding = Finding("rng", Outcome.FAILED, message, step=index, rank=trace.rank)
                return explain(finding, RedrawnCase(analysis))
    return None


def _unfair_row(every: Sequence[Row]) -> Finding | None:
    """Return what is wrong where a sample keeps far more, or far fewer, of its units than one half: all, or none."""
    limit = surprise_limit(len(every))
    for row in every:
        if _surprise_at(row.coins) > limit:
            message = f"{int(row.coins.sum())} of {len(row.coins)} units are kept, not half of them ({row.place})"
            finding = Finding("rng", Outcome.FAILED, message, step=row.place.step, rank=row.place.rank)
            return explain(finding, KeptShareCase(float(row.coins.double().mean())))
    return None


def _unfair_layer(every: Sequence[Row]) -> Finding | None:
    """Return what is wrong where a layer on a rank keeps another share of its units than one half.

    Each mask counts once: if one serves several samples its coins say no more for it.
    """
    tossed: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    for row in every:
        tossed[row.place.rank, row.place.layer].append(row.coins)
    limit = surprise_limit(len(tossed))
    for (rank, layer), own in tossed.items():
        coins = torch.unique(torch.stack(own), dim=0).flatten()
        if _surprise_at(coins) > limit:
            share = float(coins.double().mean())
            message = f"on rank {rank} {layer!r} keeps {100 * share:.4g} % of {len(coins)} units, not half of them"
            return explain(Finding("rng", Outcome.FAILED, message, step=0, rank=rank), KeptShareCase(share))
    return None


def _surprise_at(coins: torch.Tensor) -> float:
    return float(surprise(coins.double().sum(), torch.tensor(float(len(coins)))))


def _alike(every: Sequence[Row], analysis: TraceAnalysis) -> Finding | None:
    """Return what is wrong where two rows have too much, or too little, in common."""
    by_width: dict[int, list[Row]] = defaultdict(list)
    for row in every:
        by_width[len(row.coins)].append(row)
    limit = surprise_limit(sum(math.comb(len(own), 2) for own in by_width.values()))
    alike: list[tuple[Row, Row]] = []
    for width, own in by_width.items():
        if width * math.log(2) <= limit:
            raise Vacuous(f"{width} coins a sample are too few: two rows may be alike by accident")
        table = torch.stack([row.coins for row in own])
        found = surprise(agreements(table), torch.tensor(float(width))) > limit
        alike += [(own[i], own[j]) for i, j in found.triu(1).nonzero().tolist()]
    if not alike:
        return None
    first, second = min(alike, key=lambda pair: max(row.place.step for row in pair))
    message = f"{len(alike)} pairs of masks are alike: the first is ({first.place}) and ({second.place})"
    latest = max(first.place, second.place, key=lambda place: (place.step, place.rank))
    finding = Finding("rng", Outcome.FAILED, message, step=latest.step, rank=latest.rank)
    return explain(finding, AlikeMasksCase(analysis, [(a.place, b.place) for a, b in alike]))


def _streams(every: Sequence[Row]) -> Finding | None:
    """Return what is wrong where one device tosses another's coins, or its own once more, so many tosses later."""
    tossed: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for row in every:
        tossed[row.place.rank, row.place.device].append(row.coins)
    streams = {where: torch.cat(coins) for where, coins in tossed.items()}
    pairs = list(itertools.combinations_with_replacement(streams, 2))
    limit = surprise_limit(sum(len(streams[left]) + len(streams[right]) for left, right in pairs))
    for left, right in pairs:
        common, places, lags = shifted_agreements(streams[left], streams[right])
        surprises = surprise(common, places).masked_fill((lags <= 0) if left == right else lags != lags, 0.0)
        worst = int(surprises.argmax())
        if float(surprises[worst]) > limit:
            lag = int(lags[worst])
            when = f"{abs(lag)} coins {'later' if lag > 0 else 'earlier'}"
            message = (
                f"{int(common[worst])} of {int(places[worst])} coins of rank {right[0]} are those that rank {left[0]} "
                f"tosses {when}"
            )
            return explain(Finding("rng", Outcome.FAILED, message, rank=right[0]), StreamCase(left, right))
    return None
