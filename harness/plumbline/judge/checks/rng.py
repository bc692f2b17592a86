"""Are random numbers independent: different ones for every sample, on every device, on every rank, at every step?"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch

from plumbline.core.finding import Finding
from plumbline.judge.causes.rng import AlikeMasksCase, KeptShareCase, NothingDrawnCase, RedrawnCase, StreamCase
from plumbline.judge.findings import Vacuous, failed, failed_with_hint, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.oracle.dropout_masks import (
    SampleMask,
    agreements,
    masks_of,
    shifted_agreements,
    surprise,
    surprise_limit,
)
from plumbline.judge.trace_analysis import TraceAnalysis


def rng(analysis: TraceAnalysis) -> Finding | None:
    """No two masks and no two streams of bits may agree more than chance explains, and half of the bits must be set.

    Limits follow from the probability of a false alarm and the number of comparisons. None if no layer draws.
    """
    layers = [str(layer.draws) for layer in analysis.oracle.model.modules() if getattr(layer, "draws", None)]
    if not layers:
        return None
    if not analysis.steps:
        raise Vacuous("no optimizer step was seen")
    if (
        finding := _absent(layers, analysis) or _drawn_again(layers, analysis) or _unlike_members(layers, analysis)
    ) is not None:
        return finding
    masks = list(masks_of(analysis.trace, layers))
    if not masks:
        raise Vacuous("no sample went through the model")
    finding = _unfair_mask(masks) or _unfair_layer(masks) or _alike(masks, analysis) or _streams(masks)
    return finding or passed("rng", f"{len(masks)} masks keep half of the units, and no two are alike")


def _absent(layers: Sequence[str], analysis: TraceAnalysis) -> Finding | None:
    for trace in analysis.trace.ranks:
        for index, step in enumerate(trace.steps):
            for micro in step.micro_batches:
                layer = next((name for name in layers if len(micro.drawn.get(name, ())) != len(micro.samples)), None)
                if layer is not None:
                    finding = failed("rng", f"layer {layer!r} drew no mask", step=index, rank=trace.rank)
                    return explain(finding, NothingDrawnCase(analysis))
    return None


def _drawn_again(layers: Sequence[str], analysis: TraceAnalysis) -> Finding | None:
    for trace in analysis.trace.ranks:
        for index, step in enumerate(trace.steps):
            layer = next(
                (name for name in layers for micro in step.micro_batches if f"{name} again" in micro.drawn), None
            )
            if layer is not None:
                message = f"layer {layer!r} drew different masks in the backward than in the forward"
                return explain(failed("rng", message, step=index, rank=trace.rank), RedrawnCase(analysis))
    return None


def _unlike_members(layers: Sequence[str], analysis: TraceAnalysis) -> Finding | None:
    """Return the failure if ranks that compute the same activations drop different units of them.

    If each rank draws for its own part of an activation, the parts rightly differ.
    """
    for index, step in enumerate(analysis.steps):
        for judged, whole in enumerate(step.ranks):
            together = analysis.recorded_together(index, judged)
            for rank, member in together.items():
                for micro, own in zip(whole.micro_batches, member.micro_batches, strict=False):
                    for layer in layers:
                        mask, due = own.drawn.get(layer), micro.drawn.get(layer)
                        if mask is None or due is None or mask.shape != due.shape or torch.equal(mask, due):
                            continue
                        return failed_with_hint(
                            "rng",
                            f"ranks {min(together)} and {rank} compute the same activations, but layer {layer!r} drops "
                            "different units on them,",
                            "use the same seed on ranks that see the same samples",
                            cause="masks-differ-within-a-replica",
                            family="rng",
                            step=index,
                            rank=rank,
                        )
    return None


def _unfair_mask(masks: Sequence[SampleMask]) -> Finding | None:
    limit = surprise_limit(len(masks))
    for mask in masks:
        if _surprise_at(mask.bits) > limit:
            kept = f"{int(mask.bits.sum())} of {len(mask.bits)} units"
            message = f"a mask keeps {kept} instead of half of them ({mask.place})"
            finding = failed("rng", message, step=mask.place.step, rank=mask.place.rank)
            return explain(finding, KeptShareCase(float(mask.bits.double().mean())))
    return None


def _unfair_layer(masks: Sequence[SampleMask]) -> Finding | None:
    """Return the failure if a layer on a rank does not keep half of its units.

    Each mask counts once, because a mask that serves several samples carries no more information.
    """
    drawn: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    for mask in masks:
        drawn[mask.place.rank, mask.place.layer].append(mask.bits)
    limit = surprise_limit(len(drawn))
    for (rank, layer), own in drawn.items():
        bits = torch.unique(torch.stack(own), dim=0).flatten()
        if _surprise_at(bits) > limit:
            share = float(bits.double().mean())
            message = f"layer {layer!r} keeps {100 * share:.4g} % of {len(bits)} units instead of half of them"
            return explain(failed("rng", message, step=0, rank=rank), KeptShareCase(share))
    return None


def _surprise_at(bits: torch.Tensor) -> float:
    return float(surprise(bits.double().sum(), torch.tensor(float(len(bits)))))


def _alike(masks: Sequence[SampleMask], analysis: TraceAnalysis) -> Finding | None:
    by_width: dict[int, list[SampleMask]] = defaultdict(list)
    for mask in masks:
        by_width[len(mask.bits)].append(mask)
    limit = surprise_limit(sum(math.comb(len(own), 2) for own in by_width.values()))
    alike: list[tuple[SampleMask, SampleMask]] = []
    for width, own in by_width.items():
        if width * math.log(2) <= limit:
            raise Vacuous(f"{width} bits a sample are too few: two masks may be alike by chance")
        table = torch.stack([mask.bits for mask in own])
        found = surprise(agreements(table), torch.tensor(float(width))) > limit
        alike += [(own[i], own[j]) for i, j in found.triu(1).nonzero().tolist()]
    if not alike:
        return None
    first, second = min(alike, key=lambda pair: max(mask.place.step for mask in pair))
    latest = max(first.place, second.place, key=lambda place: (place.step, place.rank))
    pairs = "1 pair of masks is" if len(alike) == 1 else f"{len(alike)} pairs of masks are"
    finding = failed("rng", f"{pairs} alike, first ({first.place}) and ({second.place})")
    finding = replace(finding, step=latest.step, rank=latest.rank)
    return explain(finding, AlikeMasksCase(analysis, [(a.place, b.place) for a, b in alike]))


def _streams(masks: Sequence[SampleMask]) -> Finding | None:
    drawn: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for mask in masks:
        drawn[mask.place.rank, mask.place.device].append(mask.bits)
    streams = {where: torch.cat(bits) for where, bits in drawn.items()}
    pairs = list(itertools.combinations_with_replacement(streams, 2))
    limit = surprise_limit(sum(len(streams[left]) + len(streams[right]) for left, right in pairs))
    for left, right in pairs:
        common, places, lags = shifted_agreements(streams[left], streams[right])
        surprises = surprise(common, places).masked_fill((lags <= 0) if left == right else lags != lags, 0.0)
        worst = int(surprises.argmax())
        if float(surprises[worst]) > limit:
            lag = int(lags[worst])
            message = (
                f"{int(common[worst])} of {int(places[worst])} random bits are those that rank {left[0]} draws "
                f"{abs(lag)} bits {'later' if lag > 0 else 'earlier'},"
            )
            return explain(failed("rng", message, rank=right[0]), StreamCase(left, right))
    return None
