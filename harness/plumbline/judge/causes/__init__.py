"""Why a trainer is wrong: hypotheses predict what a mistake would have produced, and are tried against the evidence.

The most specific hypothesis whose prediction fits is the cause. Where none fits, the finding is ``unexplained`` and
keeps its figures. ``hypothesis`` has the type and the engine, ``registry`` the list of all hypotheses. Whether
something is wrong is decided in ``plumbline.judge.checks``, not here.
"""

from __future__ import annotations

from plumbline.judge.causes.gradient_case import OracleGradientCase
from plumbline.judge.causes.metric_case import MetricCase
from plumbline.judge.causes.registry import HYPOTHESES, explain, register
from plumbline.judge.hypothesis import Evidence, Hypothesis, Match
from plumbline.judge.mistakes.combination import Combination, SomeParameters
from plumbline.judge.mistakes.gradient_case import GradientCase

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
