"""The model of a recipe as lines of plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plumbline.workloads.experts import EXPERTS
from plumbline.workloads.generated import FEATURES, LABELS, OUTPUTS, TEXT, VOCABULARY, Recipe

WIDTH = 4  # outputs of the first layer
_LINEAR = "torch.nn.Linear({width}, {width})"
_APPLY = "x = self.{name}(x)"
_CHUNKS = "query, key, value = self.{name}(x).chunk(3, -1)"
_ATTENTION = "x = F.scaled_dot_product_attention(query, key, value)"

LAYERS: dict[str, tuple[str | None, list[str]]] = {
    "linear": ("torch.nn.Linear({width}, {size})", [_APPLY]),
    "tanh": (None, ["x = x.tanh()"]),
    "gelu": (None, ["x = F.gelu(x)"]),
    "layernorm": ("torch.nn.LayerNorm({width})", [_APPLY]),
    "batchnorm": ("torch.nn.BatchNorm1d({width})", ["x = self.{name}(x.flatten(0, -2)).view(x.shape)"]),
    "residual": (_LINEAR, ["x = x + self.{name}(x).tanh()"]),
    "tied": ("torch.nn.Linear({width}, {width}, bias=False)", ["x = self.{name}(self.{name}(x).tanh())"]),
    "attention": ("torch.nn.Linear({width}, 3 * {width})", [_CHUNKS, _ATTENTION]),
    "frozen": (_LINEAR + ".requires_grad_(False)", [_APPLY]),
    "unused": (_LINEAR, []),
    # The bias begins at zero and is trained from the first step on, so it shows whether that step is over.
    "thawed": (
        "torch.nn.LayerNorm({width})",
        [
            "scale = self.{name}.weight if self.{name}.bias.any() else self.{name}.weight.detach()",
            "x = x * scale + self.{name}.bias",
        ],
    ),
    # One matrix holds the experts and their router.
    "experts": (
        f"torch.nn.Linear({{width}}, {EXPERTS} * {{width}} + {EXPERTS})",
        [
            f"gates, outputs = self.{{name}}(x).tensor_split(({EXPERTS},), -1)",
            f"outputs = outputs.unflatten(-1, ({EXPERTS}, -1))",
            "x = x + (gates.relu().square().unsqueeze(-1) * outputs).sum(-2)",
        ],
    ),
}
"""For each kind of layer: the constructor of its module, if it has one, and the lines of its forward."""


class NotExpressedError(Exception):
    """A program cannot express the problem; the message says why, in words after "because"."""


@dataclass(frozen=True)
class Layer:
    """One layer: the name and constructor of its module, if it has one, and the lines of its forward."""

    name: str
    module: str | None
    forward: list[str]


def layers_of(recipe: Recipe) -> Iterator[Layer]:
    """Yield the layers of a recipe's model, from inputs to outputs; raise ``NotExpressedError`` for dropout."""
    yield _first(recipe)
    width = WIDTH
    for number, word in enumerate(recipe.layers, 1):
        kind, _, size = word.partition("-")
        if kind == "dropout":
            raise NotExpressedError("a program cannot express dropout, whose masks follow from each sample's number")
        module, forward = LAYERS[kind]
        if kind == "attention" and recipe.inputs == "features":
            forward = [_CHUNKS, "x = value + query * key"]
        values = {"name": f"layer{number}", "width": width, "size": size}
        yield Layer(f"layer{number}", module and module.format(**values), [line.format(**values) for line in forward])
        width = int(size or width)
    mean = [] if recipe.inputs == "features" or recipe.loss in ("token-mean", LABELS) else ["x = x.mean(1)"]
    returned = 'return {"logits": self.last(x), "rest": (x,)}' if recipe.returns == "nested" else "return self.last(x)"
    outputs = VOCABULARY if recipe.inputs == TEXT else OUTPUTS
    yield Layer("last", f"torch.nn.Linear({width}, {outputs})", [*mean, returned])


def _first(recipe: Recipe) -> Layer:
    if recipe.inputs == "features":
        return Layer("first", f"torch.nn.Linear({FEATURES}, {WIDTH})", ["x = self.first(x)"])
    if recipe.inputs == "images":
        pixels = "x = self.first(x).flatten(2).transpose(1, 2)"
        return Layer("first", f"torch.nn.Conv2d(2, {WIDTH}, 3, padding=1)", [pixels])
    sparse = ", sparse=True" if recipe.inputs == "sparse-tokens" else ""
    return Layer("first", f"torch.nn.Embedding({VOCABULARY}, {WIDTH}{sparse})", ["x = self.first(x)"])
