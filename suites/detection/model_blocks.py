"""Splits the jobs' models into consecutive blocks, so that a pipeline stage can hold some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """Some layers of a model: ``run`` takes the previous block's output, None in the first, and the batch."""

    layers: Sequence[nn.Module]
    run: Callable[[Any, Any], Tensor]

    def names(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters and buffers that the block needs."""
        own = {id(tensor) for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())}
        return {name for name, one in (*model.named_parameters(), *model.named_buffers()) if id(one) in own}


def blocks_of(model: nn.Module) -> list[Block]:
    """Return the blocks of a job's model in order."""
    kind = next(kind for kind in KINDS if hasattr(model, kind))
    return KINDS[kind](model)


def _in_order(layers: Sequence[nn.Module], column: str) -> list[Block]:
    def block(layer: nn.Module, first: bool) -> Block:
        return Block([layer], lambda x, batch: layer(batch[column] if first else x))

    return [block(layer, first=not number) for number, layer in enumerate(layers)]


def _perceptron(model: Any) -> list[Block]:
    return _in_order(model.layers, "x")


def _convolutions(model: Any) -> list[Block]:
    return [*_in_order(model.features, "image"), Block([model.head], lambda x, batch: model.head(x.mean((2, 3))))]


def _transformer(model: Any) -> list[Block]:
    def embed(x: Any, batch: Any) -> Tensor:
        now = batch["tokens"][:, :-1]
        return model.tokens(now) + model.places(torch.arange(now.shape[1]))

    return [
        Block([model.tokens, model.places], embed),
        Block([model.norm_1, model.attention], lambda x, batch: x + model.attention(model.norm_1(x))),
        Block([model.norm_2, model.feed], lambda x, batch: x + model.feed(model.norm_2(x))),
        Block([model.norm_3, model.head], lambda x, batch: model.head(model.norm_3(x))),
    ]


def _masked(model: Any) -> list[Block]:
    """Cut at the dropout layers, which take the batch if they draw masks, and otherwise the sample ids."""
    drawn = hasattr(model.drop_first, "coins")

    def beside(batch: Any) -> Any:
        return batch if drawn else batch["index"]

    return [
        Block([model.first], lambda x, batch: model.first(batch["x"]).tanh()),
        Block([model.drop_first], lambda x, batch: model.drop_first(x, beside(batch))),
        Block([model.middle], lambda x, batch: model.middle(x).tanh()),
        Block([model.drop_middle, model.last], lambda x, batch: model.last(model.drop_middle(x, beside(batch)))),
    ]


def _three_layers(model: Any) -> list[Block]:
    return [
        Block([model.first], lambda x, batch: model.first(batch["x"]).tanh()),
        Block([model.middle], lambda x, batch: model.middle(x).tanh()),
        Block([model.last], lambda x, batch: model.last(x)),
    ]


def _amplifying(model: Any) -> list[Block]:
    return [
        Block([model.first], lambda x, batch: model.first(batch["x"]).tanh() / batch["gain"][:, None]),
        Block([model.last], lambda x, batch: model.last(x) * batch["gain"][:, None]),
    ]


def _language_model(model: Any) -> list[Block]:
    def embed(x: Any, batch: Any) -> Tensor:
        now = model.embedding(batch["tokens"][:, :-1])
        return torch.cat((now, now.cumsum(1) / torch.arange(1, now.shape[1] + 1, dtype=now.dtype)[:, None]), -1)

    return [
        Block([model.embedding], embed),
        Block([model.mix], lambda x, batch: model.mix(x).tanh()),
        Block([model.head], lambda x, batch: model.head(x)),
    ]


KINDS: dict[str, Callable[[Any], list[Block]]] = {
    "layers": _perceptron,
    "features": _convolutions,
    "places": _transformer,
    "mix": _language_model,
    "drop_middle": _masked,
    "middle": _three_layers,
    "first": _amplifying,
}
"""Functions that cut a model, by an attribute that only models of that kind have. The first match is used."""
