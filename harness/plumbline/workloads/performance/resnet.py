"""A residual network (He et al. 2016) for small images: much arithmetic for few parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch
from plumbline.workloads.performance.performance_workload import PerformanceWorkload, ProblemSize

CLASSES = 10


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations (batch, outputs, height / stride, width / stride)."""
        outputs: Tensor = (self.way(x) + self.around(x)).relu()
        return outputs


class _ResNet(nn.Module):
    """Three stages, each of half the resolution and twice the width of the one before."""

    def __init__(self, width: int, blocks: int, image: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for before, now in zip([width, *widths], widths, strict=False):
            stride = 1 if now == width else 2
            layers += [ResidualBlock(before, now, stride), *(ResidualBlock(now, now, 1) for _ in range(blocks - 1))]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        outputs: Tensor = self.head(self.features(batch["image"]).mean((2, 3)))
        return outputs


class ResNet(PerformanceWorkload):
    """Image classification, with momentum."""

    name = "perf-resnet"
    dominated_by = "arithmetic: convolutions use each weight at every place of the image"
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize({"width": 8, "blocks": 1, "image": 32}, batch=8, steps=8),
        "cuda": ProblemSize({"width": 64, "blocks": 3, "image": 64}, batch=64, steps=40, warmup=10),
    }

    def build(self) -> nn.Module:
        """Return the network; outputs are (batch, classes)."""
        return _ResNet(**self.size.model)

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``image`` (3, image, image) and the class ``y``."""
        side = self.size.model["image"]
        return {
            "image": torch.randn(count, 3, side, side, generator=generator),
            "y": torch.randint(CLASSES, (count,), generator=generator),
        }

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class ResNetStrong(ResNet):
    """The same with a batch that does not grow with the number of devices."""

    name = "perf-resnet-strong"
    strong = True
    backends = ("none", "ddp")
    on_nodes = ()
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize({"width": 8, "blocks": 1, "image": 32}, batch=1, steps=8),
        "cuda": ProblemSize({"width": 64, "blocks": 3, "image": 64}, batch=16, steps=40, warmup=10),
    }
