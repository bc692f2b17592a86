"""The model of a drawn problem as plain torch, in source code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from plumbline.hunt.program.expressions import CLASSES, LAYERS
from plumbline.workloads.generated import FEATURES, LABELS, LENGTH, OUTPUTS, SIDE, TEXT, VOCABULARY, Recipe

WIDTH = 4
"""Outputs of the first layer."""


class NotExpressedError(Exception):
    """A recipe has something that no short program expresses; the message says what."""


@dataclass(frozen=True)
class PlainModel:
    """The model of a recipe in a precision, as the templates of programs use it."""

    recipe: Recipe
    precision: str

    @cached_property
    def modules(self) -> list[str]:
        """The layers of the model, the arguments of ``Sequential``."""
        return list(self._modules())

    @property
    def sequential(self) -> str:
        """What the model is made of: ``Sequential``, or a class of ``definitions``."""
        return "_Nested" if self.recipe.returns == "nested" else "torch.nn.Sequential"

    @property
    def cast(self) -> str:
        """What makes a model one of the cell's precision."""
        return ".double()" if self.precision == "64" else ""

    @property
    def spares(self) -> list[str]:
        """Layers that no forward uses, each as an expression."""
        width, spares = WIDTH, []
        for word in self.recipe.layers:
            kind, _, size = word.partition("-")
            width = int(size or width)
            spares += [f"torch.nn.Linear({width}, {width})"] if kind == "unused" else []
        return spares

    @property
    def definitions(self) -> list[str]:
        """The classes of layers that torch has not, each as its source."""
        kinds = [word.partition("-")[0] for word in self.recipe.layers]
        if self.recipe.inputs == "images" and not self._by_channel:
            kinds.insert(0, "pixels")
        wanted = dict.fromkeys(self._class_of(kind) for kind in kinds)
        if self.recipe.returns == "nested":
            wanted["_Nested"] = None
        return [CLASSES[name] for name in wanted if name in CLASSES]

    def inputs(self, count: int) -> str:
        """Return the inputs of so many samples, as an expression."""
        if self.recipe.inputs == "features":
            return f"torch.rand({count}, 1) * torch.randn({count}, {FEATURES})"
        if self.recipe.inputs == "images":
            return f"torch.randn({count}, 2, {SIDE}, {SIDE})"
        if self.recipe.inputs == TEXT:
            return f"x := torch.randint({VOCABULARY}, ({count}, {LENGTH + 1}))"
        return f"torch.randint({VOCABULARY}, ({count}, {LENGTH}))"

    def _modules(self) -> Iterator[str]:
        inputs = self.recipe.inputs
        if inputs == "features":
            yield f"torch.nn.Linear({FEATURES}, {WIDTH})"
        elif inputs == "images":
            yield f"{'torch.nn.Conv2d' if self._by_channel else '_Pixels'}(2, {WIDTH}, 3, padding=1)"
        else:
            sparse = ", sparse=True" if inputs == "sparse-tokens" else ""
            yield f"torch.nn.{'EmbeddingBag' if self._in_bags else 'Embedding'}({VOCABULARY}, {WIDTH}{sparse})"
        width = WIDTH
        for word in self.recipe.layers:
            kind, _, size = word.partition("-")
            if kind != "unused":
                yield self._layer(kind, width, int(size or width))
            width = int(size or width)
        if self._by_channel:
            yield "torch.nn.AdaptiveAvgPool2d(1)"
            yield "torch.nn.Flatten()"
        elif inputs != "features" and not self._by_token and not self._in_bags:
            yield f"torch.nn.AvgPool2d(({LENGTH if inputs != 'images' else SIDE * SIDE}, 1))"  # the mean over tokens
            yield "torch.nn.Flatten()"
        yield f"torch.nn.Linear({width}, {VOCABULARY if inputs == TEXT else OUTPUTS})"

    @property
    def _by_token(self) -> bool:
        """Whether there are outputs for each token."""
        return self.recipe.loss in ("token-mean", LABELS)

    @property
    def _in_bags(self) -> bool:
        """Whether the mean over tokens is taken as they are embedded: no layer takes them one by one."""
        tokens = self.recipe.inputs in ("tokens", "sparse-tokens")
        return tokens and not self._by_token and {"unused"}.issuperset(self.recipe.layers)

    @property
    def _by_channel(self) -> bool:
        """Whether layers can take images as they are; others take pixels as tokens, their channels last."""
        return self.recipe.inputs == "images" and {"tanh", "gelu", "unused"}.issuperset(self.recipe.layers)

    def _layer(self, kind: str, width: int, size: int) -> str:
        if kind == "dropout":
            raise NotExpressedError("dropout, whose masks follow from each sample's number, which layers do not see")
        return LAYERS[kind].format(width=width, size=size, made=self._class_of(kind))

    def _class_of(self, kind: str) -> str | None:
        """Return the class of ``definitions`` that a layer needs."""
        if kind == "batchnorm":
            return "torch.nn.BatchNorm1d" if self.recipe.inputs == "features" else "_BatchNorm"
        if kind == "attention":
            return "_Product" if self.recipe.inputs == "features" else "_Attention"
        return {"pixels": "_Pixels", "residual": "_Residual", "thawed": "_Thawed", "experts": "_Experts"}.get(kind)
