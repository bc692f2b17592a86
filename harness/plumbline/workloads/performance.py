"""Problems that are trained to measure speed and memory. ``PERFORMANCE`` maps their names to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Perceptron
from plumbline.workloads.dataset import Batch
from plumbline.workloads.performance_workload import PerformanceWorkload, ProblemSize


class SmallSteps(PerformanceWorkload):
    """A perceptron of 19 thousand parameters and few samples: at most a millisecond of arithmetic per step anywhere."""

    name = "perf-mlp"
    dominated_by = "overhead: the arithmetic of a step takes less than the calls that ask for it"
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize({"inputs": 64, "width": 256, "classes": 8}, batch=4, steps=80),
        "cuda": ProblemSize({"inputs": 64, "width": 256, "classes": 8}, batch=4, steps=200, warmup=10),
    }

    def build(self) -> nn.Module:
        size = self.size.model
        return Perceptron(
            nn.Linear(size["inputs"], size["width"]), nn.ReLU(), nn.Linear(size["width"], size["classes"])
        )

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x`` (inputs,) and the class ``y``."""
        size = self.size.model
        return {
            "x": torch.randn(count, size["inputs"], generator=generator),
            "y": torch.randint(size["classes"], (count,), generator=generator),
        }


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
        return (self.way(x) + self.around(x)).relu()


class _ResNet(nn.Module):
    """Three stages, each with half the resolution and twice the width of the previous one."""

    def __init__(self, width: int, blocks: int, image: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for before, now in zip([width, *widths], widths, strict=False):
            stride = 1 if now == width else 2
            layers += [ResidualBlock(before, now, stride), *(ResidualBlock(now, now, 1) for _ in range(blocks - 1))]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(widths[-1], CLASSES)

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.features(batch["image"]).mean((2, 3)))


class ResNet(PerformanceWorkload):
    """Image classification, with momentum."""

    name = "perf-resnet"
    dominated_by = "arithmetic: convolutions use each weight at every place of the image"
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize({"width": 8, "blocks": 1, "image": 32}, batch=8, steps=8),
        "cuda": ProblemSize({"width": 64, "blocks": 3, "image": 64}, batch=64, steps=40, warmup=10),
    }

    def build(self) -> nn.Module:
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
    """``perf-resnet`` with a global batch that does not grow with the number of devices."""

    name = "perf-resnet-strong"
    strong = True
    backends = ("none", "ddp")
    on_nodes = ()
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize({"width": 8, "blocks": 1, "image": 32}, batch=1, steps=8),
        "cuda": ProblemSize({"width": 64, "blocks": 3, "image": 64}, batch=16, steps=40, warmup=10),
    }


class TransformerBlock(nn.Module):
    """Causal attention, then a perceptron, each with a LayerNorm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return activations of the same shape, (batch, length, width)."""
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.project(self.norm_1(x)).view(split).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.norm_2(x))


class _Gpt(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        now = batch["tokens"][:, :-1]
        x = self.tokens(now) + self.places(torch.arange(now.shape[1], device=now.device))
        return self.head(self.norm(self.blocks(x)))


class Gpt(PerformanceWorkload):
    """Next-token prediction with AdamW."""

    name = "perf-gpt"
    dominated_by = "communication: a device has a sequence or two, and the gradients of all weights to average"
    precisions = ("32", "16", "bf16")
    on_nodes = ("ddp", "ddp2")
    sizes: ClassVar[dict[str, ProblemSize]] = {
        "cpu": ProblemSize(
            {"width": 128, "heads": 4, "layers": 2, "vocabulary": 1024, "length": 16}, batch=1, steps=12
        ),
        "cuda": ProblemSize(
            {"width": 768, "heads": 12, "layers": 12, "vocabulary": 50257, "length": 256}, batch=2, steps=30, warmup=10
        ),
    }

    def build(self) -> nn.Module:
        return _Gpt(**self.size.model)

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``tokens`` (length + 1,)."""
        size = self.size.model
        return {"tokens": torch.randint(size["vocabulary"], (count, size["length"] + 1), generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)


PERFORMANCE: dict[str, PerformanceWorkload] = {
    workload.name: workload for workload in (SmallSteps(), ResNet(), ResNetStrong(), Gpt())
}
