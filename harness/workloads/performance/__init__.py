"""Problems that are trained for their speed and memory. One file a workload, one line in ``PERFORMANCE``."""

from __future__ import annotations

from harness.workloads.performance.base import Extent, PerformanceWorkload, Size
from harness.workloads.performance.gpt import Gpt
from harness.workloads.performance.mlp import Mlp
from harness.workloads.performance.resnet import ResNet, ResNetStrong

PERFORMANCE: dict[str, PerformanceWorkload] = {
    workload.name: workload for workload in (Mlp(), ResNet(), ResNetStrong(), Gpt())
}

__all__ = ["PERFORMANCE", "Extent", "PerformanceWorkload", "Size"]
