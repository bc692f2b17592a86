"""The mistakes that are known to happen to a gradient, each as a prediction. One file a family, one entry a mistake.

The order is that of trying: the specific before the general. Conclusions come when no prediction fits: they are
drawn from the evidence itself, by fitting weights to it or by elimination, and so they say less.
"""

from __future__ import annotations

from harness.judge.causes.explanation import Explanation
from harness.judge.causes.mistakes import (
    accumulation,
    amp,
    averaging,
    clipping,
    coupling,
    data,
    normalisation,
    optimizer,
    several,
    sync,
    unused,
)

PREDICTIONS: tuple[Explanation, ...] = (
    *clipping.UNSCALED,
    *amp.SCALE,
    *unused.EXPLANATIONS,
    *optimizer.EXPLANATIONS,
    *averaging.SPECIFIC,
    *sync.SPECIFIC,
    *accumulation.EXPLANATIONS,
    *averaging.TWICE,
    *sync.LATE,
    *accumulation.NOT_ZEROED,
    *clipping.EXPLANATIONS,
    *normalisation.COUNTS,
    *several.EXPLANATIONS,
    *averaging.GENERAL,
    *sync.GENERAL,
    *accumulation.GENERAL,
    *coupling.EXPLANATIONS,
    *data.EXPLANATIONS,
)

CONCLUSIONS: tuple[Explanation, ...] = (
    *clipping.UNASKED,
    *several.LAST,
    *accumulation.CONSTANT,
    *averaging.CONSTANT,
    *normalisation.CONSTANT,
    *amp.PRECISION,
    *accumulation.FITTED,
    *normalisation.FITTED,
    *coupling.LAST,
    *normalisation.LAST,
)
