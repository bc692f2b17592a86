"""Why a trainer is wrong: hypotheses predict what a mistake would have produced, and are tried against the evidence.

The most specific hypothesis whose prediction fits is the cause. Where none fits, the finding is ``unexplained`` and
keeps its figures. ``hypothesis`` has the type and the engine, ``registry`` the list of all hypotheses. Whether
something is wrong is decided in ``plumbline.judge.checks``, not here.
"""

from __future__ import annotations

from plumbline.judge.causes.gradient_case import GradientCase
from plumbline.judge.causes.hypothesis import Evidence, Hypothesis, Match
from plumbline.judge.causes.metric_case import MetricCase
from plumbline.judge.causes.registry import HYPOTHESES, explain, register

__all__ = [
    "HYPOTHESES",
    "Evidence",
    "GradientCase",
    "Hypothesis",
    "Match",
    "MetricCase",
    "explain",
    "register",
]
