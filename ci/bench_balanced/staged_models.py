"""The measured models: each is a Sequential with a step of about a second on one core, and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from plumbline.trainer import Module
from plumbline.workloads.performance import ResidualBlock, TransformerBlock

DIFFERENT = 4
"""The number of different batches; after them, they repeat."""


class Tokens(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, length, width) for (batch, length)."""
        outputs: Tensor = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return outputs


@dataclass(frozen=True)
class Problem:
    """A model, its data and its optimizer. ``draw(count)`` returns inputs and classes."""

    name: str
    description: str
    network: Callable[[], nn.Sequential]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch_size: int

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def loader(self, steps: int) -> DataLoader[Any]:
        """Return the batches of ``steps`` steps, the same in every training."""
        samples = Samples(self, steps)
        return DataLoader(samples, batch_size=self.batch_size, collate_fn=lambda batch: batch)


class Samples(Dataset[Any]):
    """The samples of some steps, drawn a batch at a time, so that collation does not count."""

    def __init__(self, problem: Problem, steps: int) -> None:
        torch.manual_seed(1)
        self.inputs, self.targets = problem.draw(DIFFERENT * problem.batch_size)
        self.count = steps * problem.batch_size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % len(self.inputs)], self.targets[index % len(self.inputs)]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return a batch."""
        chosen = torch.tensor(indices) % len(self.inputs)
        return self.inputs[chosen], self.targets[chosen]


class Task(Module):
    """A problem as users write it; ``begun`` is called on each rank with its optimizer and the task."""

    def __init__(self, problem: Problem, steps: int, begun: Callable[[Task, torch.optim.Optimizer], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.problem, self.steps, self.begun = problem.network(), problem, steps, begun

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        return self.problem.loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        optimizer = self.problem.optimizer(self.parameters())
        self.begun(self, optimizer)
        return optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the data."""
        return self.problem.loader(self.steps)


def gpt(width: int = 160, heads: int = 5, layers: int = 8, vocabulary: int = 4096, length: int = 128, batch: int = 48,
        ) -> Problem:  # fmt: skip
    """Return a language model shaped like GPT-2: equal blocks between an embedding and a head."""

    def network() -> nn.Sequential:
        blocks = [TransformerBlock(width, heads) for _ in range(layers)]
        head = [nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)]
        return nn.Sequential(Tokens(vocabulary, length, width), *blocks, *head)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (count, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    description = f"{layers} layers of width {width}, vocabulary {vocabulary}, {batch} × {length} tokens, AdamW"
    return Problem("GPT", description, network, draw, torch.optim.AdamW, batch)


def resnet(width: int = 32, blocks: int = 3, image: int = 32, batch: int = 64) -> Problem:
    """Return a residual network for small images: early blocks take longer, late ones have more weights."""

    def network() -> nn.Sequential:
        widths = [width, 2 * width, 4 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        for before, now in zip([width, *widths], widths, strict=False):
            stride = 1 if now == width else 2
            layers += [ResidualBlock(before, now, stride), *(ResidualBlock(now, now, 1) for _ in range(blocks - 1))]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, image, image), torch.randint(10, (count,))

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(weights, lr=0.01, momentum=0.9)

    description = f"{6 * blocks + 2} layers of width {width} to {4 * width}, {batch} images of {image} × {image}, SGD"
    return Problem("ResNet", description, network, draw, optimizer, batch)


def embedding(rows: int = 250_000, columns: int = 64, fields: int = 8, width: int = 1024, layers: int = 6,
              batch: int = 2048) -> Problem:  # fmt: skip
    """Return a perceptron with a huge embedding: one block has nearly all weights and little arithmetic."""

    def network() -> nn.Sequential:
        sizes = [fields * columns] + [width] * layers
        hidden = [part for ends in pairwise(sizes) for part in (nn.Linear(*ends), nn.ReLU())]
        return nn.Sequential(nn.Embedding(rows, columns), nn.Flatten(), *hidden, nn.Linear(width, 10))

    def draw(count: int) -> tuple[Tensor, Tensor]:
        return torch.randint(rows, (count, fields)), torch.randint(10, (count,))

    description = f"embedding of {rows:,} × {columns}, {layers} layers of width {width}, batch {batch}, Adam"
    return Problem("embedding", description, network, draw, torch.optim.Adam, batch)


SIZES: dict[str, Callable[[], list[Problem]]] = {
    "real": lambda: [gpt(), resnet(), embedding()],
    "tiny": lambda: [
        gpt(16, 2, 3, 20, 6, batch=4),
        resnet(4, 1, 8, batch=4),
        embedding(50, 4, 2, 8, 3, batch=4),
    ],
}
