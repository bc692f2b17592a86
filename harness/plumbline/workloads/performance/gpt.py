"""A causal transformer in the shape of GPT-2 (Radford et al. 2019) on few tokens: many parameters to average."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.dataset import Batch
from plumbline.workloads.performance.performance_workload import PerformanceWorkload, ProblemSize


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
        outputs: Tensor = x + self.feed(self.norm_2(x))
        return outputs


class _Gpt(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        now = batch["tokens"][:, :-1]
        x = self.tokens(now) + self.places(torch.arange(now.shape[1], device=now.device))
        outputs: Tensor = self.head(self.norm(self.blocks(x)))
        return outputs


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
        """Return the transformer; outputs are (batch, length, vocabulary)."""
        return _Gpt(**self.size.model)

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``tokens`` (length + 1,)."""
        size = self.size.model
        return {"tokens": torch.randint(size["vocabulary"], (count, size["length"] + 1), generator=generator)}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)
