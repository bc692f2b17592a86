"""Problems that are trained for their speed and memory; ``PERFORMANCE`` has them by name."""

from __future__ import annotations

from harness.workloads.performance.gpt import Gpt
from harness.workloads.performance.performance_workload import Extent, PerformanceWorkload, ProblemSize
from harness.workloads.performance.resnet import ResNet, ResNetStrong
from harness.workloads.performance.small_steps import SmallSteps

PERFORMANCE: dict[str, PerformanceWorkload] = {
    workload.name: workload for workload in (SmallSteps(), ResNet(), ResNetStrong(), Gpt())
}

__all__ = ["PERFORMANCE", "Extent", "PerformanceWorkload", "ProblemSize"]
