"""Small models of many kinds, each with a function that draws a batch and one that computes a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Example:
    """A model, the shape of a batch of normal numbers (or of token ids), and a function from output to loss."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (6, 8)
    tokens: bool = False
    loss: Callable[[object], Tensor] = lambda output: output.pow(2).mean()  # type: ignore[attr-defined]

    def batch(self) -> Tensor:
        return torch.randint(0, 12, self.shape) if self.tokens else torch.randn(self.shape)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.position = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        return self.attention(x, x, x, need_weights=False)[0]


class Casting(nn.Module):
    """Casts down and up, as norms and softmaxes do in mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).float().to(torch.float32)
        h = F.softmax(h, -1, dtype=torch.float32).type_as(x) + torch.zeros(8, dtype=torch.float32)
        return self.second(h.type(torch.float32) * torch.tensor(0.5))


class Drawing(nn.Module):
    """Draws random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(8, 4), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.mean(x) + self.spread(x) * torch.randn_like(self.spread(x)) + torch.rand(4)
        return self.dropout(F.gumbel_softmax(z)) + torch.empty(4).uniform_()


class DropPath(nn.Module):
    """Draws in its inputs' dtype, which differs in a replay, and once in a fixed dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * torch.rand((len(h), 1), dtype=h.dtype, device=h.device).add(0.5).floor()
        h = h + torch.randn_like(h, dtype=h.dtype) + torch.rand(8, dtype=torch.float64)
        return self.second((h * torch.rand(8, dtype=torch.float32)).to(x.dtype))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h * torch.rand(h.shape, generator=self.generator)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.second, x, use_reentrant=self.reentrant)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(8))})
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.plain = [self.scales[0], (self.scales[1], self.layers[0].weight)]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.plain.append(x)
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = torch.tanh(layer(x)) * scale
        return F.linear(x * self.plain[0], self.plain[1][1]) * self.plain[1][0] + self.named["shift"]


class Nested(nn.Module):
    """Returns nested outputs: one is also used inside, one is used twice, and one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        h = torch.tanh(self.body(x))
        logits = self.head(h)
        return {"logits": logits, "hidden": [h, (h, logits)], "loss": logits.pow(2).mean(), "arg": logits.argmax(-1)}


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.GELU()
    )


def _old_norms() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 4)))


def _new_norms() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, 4))
    )


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


def _nested_loss(output: dict[str, object]) -> Tensor:
    h, (same, logits) = output["hidden"]  # type: ignore[misc]
    return output["loss"] + h.mean() + (same * 0.5).sin().mean() + logits.exp().mean()  # type: ignore[operator,no-any-return]


EXAMPLES = {
    "linear": Example(lambda: nn.Linear(8, 4)),
    "convolutions": Example(_convolutions, (4, 3, 12)),
    "tied": Example(Tied, (4, 6), tokens=True),
    "lstm": Example(lambda: Recurrent(nn.LSTM), (3, 5, 8)),
    "gru": Example(lambda: Recurrent(nn.GRU), (3, 5, 8)),
    "attention": Example(Attention, (3, 5, 8)),
    "transformer": Example(_transformer, (3, 5, 8)),
    "casting": Example(Casting),
    "drawing": Example(Drawing),
    "own-generator": Example(OwnGenerator),
    "checkpoint": Example(lambda: Checkpointed(reentrant=False)),
    "reentrant-checkpoint": Example(lambda: Checkpointed(reentrant=True)),
    "lists": Example(Lists),
    "nested": Example(Nested, loss=_nested_loss),  # type: ignore[arg-type]
    "frozen": Example(Frozen),
    "old-norms": Example(_old_norms),
    "drop-path": Example(DropPath),
    "new-norms": Example(_new_norms),
}
