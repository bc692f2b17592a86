"""Which ranks' own gradients make up each rank's gradient, for the picture of a gradient's path in a report."""

from __future__ import annotations

from typing import Final

from plumbline.core.finding import RankShares
from plumbline.judge.causes.combinations import fit_weights, weighted
from plumbline.judge.oracle.noise import distance
from plumbline.judge.oracle.oracle import mean_gradient
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

MOST_RANKS: Final = 8


def rank_shares(step: GlobalStep, analysis: TraceAnalysis) -> RankShares | None:
    """Return each rank's gradient as a weighted sum of the ranks' own gradients.

    None if that is unknown: one rank or too many, ranks that hold one model together, or gradients that no such sum
    explains within the noise.
    """
    expected = analysis.expected[step.index]
    world = len(step.ranks)
    if analysis.is_staged or not 1 < world <= MOST_RANKS or any(len(parts) != world for parts in expected.parts):
        return None
    own = [mean_gradient([[parts[rank]] for parts in expected.parts]) for rank in range(world)]
    names = list(expected.raw)
    rows = []
    for gradients in (expected.contract, *(one.gradients for one in step.ranks)):
        weights = fit_weights(own, gradients, names) if gradients.keys() == expected.contract.keys() else None
        if weights is None:
            return None
        summed = weighted(own, weights, expected.contract)
        # Units are those of a mean: a sum with larger weights has larger roundings.
        growth = max(1.0, world * max(map(abs, weights)))
        noise = {name: growth * analysis.noise.at(name, unit) for name, unit in expected.units.items()}
        if any(not distance(gradients[name], summed[name]) <= analysis.limit * noise[name] for name in names):
            return None
        rows.append(tuple(round(weight, 4) for weight in weights))
    return RankShares(step.index, rows[0], tuple(rows[1:]))
