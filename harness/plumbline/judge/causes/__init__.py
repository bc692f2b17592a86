"""Why a trainer is wrong: hypotheses predict what a mistake would produce, and are tried on the evidence.

The most specific hypothesis that fits is the cause. If none fits, the finding is ``unexplained`` and keeps its figures.
``registry`` lists all hypotheses. ``plumbline.judge.checks`` decides whether something is wrong.
"""

from __future__ import annotations

from plumbline.judge.causes.metric_case import MetricCase
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.causes.registry import HYPOTHESES, explain, register
from plumbline.judge.hypothesis import Evidence, Hypothesis, Match
from plumbline.judge.mistakes.case import GradientCase
from plumbline.judge.mistakes.combination import Combination, SomeParameters

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
