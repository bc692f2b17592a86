"""Why a trainer is wrong: hypotheses predict what a mistake would produce, and are tried on the evidence.

The most specific hypothesis that fits is the cause. If none fits, the finding is ``unexplained`` and keeps its figures.
``plumbline.judge.checks`` decides whether something is wrong. A file of hypotheses registers them, and needs one import
here.

from plumbline.judge.causes import GradientCase, Hypothesis, register
register(GradientCase, Hypothesis("my-cause", "sync", predict, "…", "…", specificity=600))
"""

from __future__ import annotations

from plumbline.judge.causes import (
    launch,
    learning_rate,
    metric_hypotheses,
    optimizer_state,
    resumed_progress,
    resumed_state,
    rng,
    samples,
    step_count,
    update,
    validation,
    weights,
)
from plumbline.judge.causes.gradient_hypotheses import (
    amp,
    clipping,
    coupling,
    data,
    experts,
    meshes,
    normalisation,
    parameters,
    shards,
    stages,
)
from plumbline.judge.causes.metric_hypotheses import MetricCase
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.hypothesis import HYPOTHESES, Evidence, Hypothesis, Match, explain, register
from plumbline.judge.mistakes import accumulation, scaling, synchronisation
from plumbline.judge.truth import Combination, GradientCase, SomeParameters

__all__ = [
    "HYPOTHESES",
    "Combination",
    "Evidence",
    "GradientCase",
    "Hypothesis",
    "Match",
    "MetricCase",
    "OracleGradientCase",
    "SomeParameters",
    "explain",
    "register",
]
