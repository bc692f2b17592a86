"""Problems that are trained to measure speed and memory, by name in ``PERFORMANCE``."""

from __future__ import annotations

from plumbline.workloads.performance.gpt import Gpt
from plumbline.workloads.performance.performance_workload import Extent, PerformanceWorkload, ProblemSize
from plumbline.workloads.performance.resnet import ResNet, ResNetStrong
from plumbline.workloads.performance.small_steps import SmallSteps

PERFORMANCE: dict[str, PerformanceWorkload] = {
    workload.name: workload for workload in (SmallSteps(), ResNet(), ResNetStrong(), Gpt())
}

__all__ = ["PERFORMANCE", "Extent", "PerformanceWorkload", "ProblemSize"]
