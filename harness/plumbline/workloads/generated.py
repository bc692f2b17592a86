"""A training problem built from a recipe: a few words and numbers that a search can draw at random and shrink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plumbline.workloads.basics import Plain
from plumbline.workloads.dataset import Batch
from plumbline.workloads.experts import EXPERTS, Experts
from plumbline.workloads.parameter_use import Adapted
from plumbline.workloads.randomness import KeyedDropout

INPUTS = ("features", "tokens", "sparse-tokens", "images")
LOSSES = ("classes", "squares", "token-mean", "in-batch", "two")
TEXT, LABELS = "text", "labels"
"""The inputs and the loss for trainers that support only language models."""
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "groups", "several", "muon")
SCHEDULES = ("none", "warm-up")
RETURNS = ("logits", "nested")

FEATURES, VOCABULARY, LENGTH, SIDE, OUTPUTS = 6, 11, 5, 4, 3


@dataclass(frozen=True)
class Recipe:
    """A problem in words and numbers. The defaults give the simplest one: linear layers, a mean loss, and SGD.

    Args:
        inputs: kind of sample: a vector of ``features``, a sequence of ``tokens`` (embedded; ``sparse-tokens`` with
            sparse gradients), an image (``images``), or a ``text`` whose next tokens are the ``labels``.
        layers: keys of ``LAYERS``, applied one after the other; ``linear-7`` has 7 outputs. If there is an
            ``adapter``, only adapters are trained.
        loss: ``classes`` mean cross entropy, ``squares`` mean squared error, ``token-mean`` cross entropy over the real
            tokens of unequal sequences, ``in-batch`` cross entropy among the samples of the batch, ``two`` the sum of
            ``classes`` and a squared error, ``labels`` cross entropy over the next tokens of texts.
        optimizer: one of ``OPTIMIZERS``; ``groups`` is AdamW with two parameter groups, ``several`` is SGD and Adam,
            ``muon`` is Muon for matrices and AdamW for all other parameters.
        batch_size: samples of a global batch, rounded up to a multiple of the number of devices.
        left_out: number of samples missing from the last of several batches, which keeps at least one per device.
        clip_norm: norm to which gradients are clipped; None: no clipping.
        returns: output of the model: ``logits``, or ``nested``, a dict of the logits and the head's input, whose mean
            square is added to the loss.
        interrupt_after: number of optimizer steps after which new processes resume from a checkpoint; None: no
            interruption.
        metrics: whether the mean loss that the trainer reports for an epoch is judged.
    """

    inputs: str = "features"
    layers: tuple[str, ...] = ()
    loss: str = "classes"
    optimizer: str = "sgd"
    schedule: str = "none"
    batch_size: int = 4
    steps_per_epoch: int = 1
    epochs: int = 1
    left_out: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    validate_every: int | None = None
    interrupt_after: int | None = None
    metrics: bool = False
    returns: str = "logits"
    shuffle: bool = False
    seed: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training, including those of short windows at the end of epochs."""
        return self.epochs * -(-self.steps_per_epoch // self.accumulate)


class Generated(Plain):
    """The problem that a recipe describes. A subclass sets ``name`` and ``recipe``."""

    recipe: ClassVar[Recipe]
    exposes = "whatever a search found"

    def __init_subclass__(cls) -> None:
        made = cls.recipe
        cls.needs = frozenset(_needs(made))
        cls.blocks = _blocks(made.layers)
        cls.adapters = "adapter" in made.layers
        cls.needs_torch = (2, 9) if made.optimizer == "muon" else (0, 0)
        cls.unused_parameters = not {"unused", "thawed"}.isdisjoint(made.layers)
        cls.mean_over_labels = made.loss == LABELS
        cls.batch_size, cls.steps_per_epoch, cls.epochs = made.batch_size, made.steps_per_epoch, made.epochs
        cls.accumulate, cls.clip_norm, cls.shuffle, cls.seed = made.accumulate, made.clip_norm, made.shuffle, made.seed
        cls.validate_every, cls.interrupt_after = made.validate_every, made.interrupt_after
        cls.gloo_only = "all-reduce sparse gradients" if made.inputs == "sparse-tokens" else None
        cls.warm_up = None if made.schedule == "none" else (2, 0.8)
        if not made.shuffle or made.left_out:
            cls.needs_epochs = "needs the order and the end of an epoch"
        elif made.steps_per_epoch < made.accumulate:  # one step would use samples again
            cls.needs_epochs = "needs windows that end with an epoch"
        else:
            cls.needs_epochs = None

    def build(self) -> nn.Module:
        model = _Model(self.recipe)
        if self.adapters:
            model.requires_grad_(False)
            for layer in model.layers:
                if isinstance(layer, Adapted):
                    layer.down.requires_grad_(True)
                    layer.up.requires_grad_(True)
        return model

    def columns(self, count: int, generator: torch.Generator) -> Batch:
        """Return ``x``, the class ``y`` and the vector ``target``; for tokens also ``labels`` and ``real``.

        Texts have only ``tokens``, ``labels`` and ``real``, as ``mean_over_labels`` requires. All begin with the same
        token.
        """
        given = {
            "y": torch.randint(OUTPUTS, (count,), generator=generator),
            "target": torch.randn(count, OUTPUTS, generator=generator),
        }
        if self.recipe.inputs == "features":
            # Samples of different norms have different gradients, so that a wrong weighting of samples shows.
            loudness = torch.randn(count, 1, generator=generator).exp()
            return {**given, "x": loudness * torch.randn(count, FEATURES, generator=generator)}
        if self.recipe.inputs == "images":
            return {**given, "x": torch.randn(count, 2, SIDE, SIDE, generator=generator)}
        lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
        labels = torch.randint(OUTPUTS, (count, LENGTH), generator=generator)
        real = torch.arange(LENGTH) < lengths
        words = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        if self.recipe.inputs == TEXT:
            begin = torch.full((count, 1), VOCABULARY - 1)
            tokens = torch.cat((begin, words * real), 1)
            return {"tokens": tokens, "real": real, "labels": words.where(real, -100)}
        return {**given, "x": words, "real": real, "labels": labels}

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        if self.recipe.returns == "nested":
            (hidden,) = outputs["rest"]
            # Autocast computes mse_loss in float32. In float16 the scaled gradient of a plain mean is out of range.
            beside = nn.functional.mse_loss(hidden, torch.zeros_like(hidden))
            return _LOSSES[self.recipe.loss](outputs["logits"], batch) + 0.1 * beside
        return _LOSSES[self.recipe.loss](outputs, batch)

    def optimizers(self, params: Iterable[Any]) -> list[torch.optim.Optimizer]:
        every = _optimizers(self.recipe.optimizer, list(params))
        # A GradScaler raises if an optimizer has no gradient, and nobody makes one for frozen parameters alone.
        return [one for one in every if any(own.requires_grad for group in one.param_groups for own in group["params"])]

    def samples(self, devices: int) -> int:
        size = self.global_batch_size(devices)
        most = size - devices if self.steps_per_epoch > 1 else 0
        return self.steps_per_epoch * size - min(self.recipe.left_out, most)


def _needs(recipe: Recipe) -> Iterator[str]:
    asked = {
        "accumulation": recipe.accumulate > 1,
        "clipping": recipe.clip_norm is not None,
        "scheduler": recipe.schedule != "none",
        "several-optimizers": recipe.optimizer in ("several", "muon"),
        "matrix-optimizer": recipe.optimizer == "muon",
        "validation": recipe.validate_every is not None,
        "checkpoint": recipe.interrupt_after is not None,
        "metrics": recipe.metrics,
        "nested-outputs": recipe.returns == "nested",
        "unused-parameters": not {"unused", "thawed"}.isdisjoint(recipe.layers),
        "frozen-parameters": not {"frozen", "adapter"}.isdisjoint(recipe.layers),
        "sparse-gradients": recipe.inputs == "sparse-tokens",
    }
    return (capability for capability, needed in asked.items() if needed)


def _blocks(layers: tuple[str, ...]) -> int:
    if "thawed" in layers:
        return 2
    plain = layers.index("experts") if "experts" in layers else len(layers)
    return plain + 2


class _Model(nn.Module):
    """Input layer, layers, mean over tokens or pixels if the loss has one term per sample, head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        if recipe.inputs == "images":
            self.first: nn.Module = nn.Conv2d(2, 4, 3, padding=1)
        elif recipe.inputs == "features":
            self.first = nn.Linear(FEATURES, 4)
        else:
            self.first = nn.Embedding(VOCABULARY, 4, sparse=recipe.inputs == "sparse-tokens")
        width = 4
        layers: list[nn.Module] = []
        for word in recipe.layers:
            kind, _, size = word.partition("-")
            layer = LAYERS[kind](width, int(size) if size else width)
            width = int(size) if size else width
            if isinstance(layer, _Dropout):
                layer.masks.layer = len(layers)  # so that each layer has different masks
            layers.append(layer)
        self.layers = nn.ModuleList(layers)
        outputs = VOCABULARY if recipe.inputs == TEXT else OUTPUTS
        self.head = nn.Linear(width, outputs)
        if "thawed" in recipe.layers:
            self.weights_seen = _WeightsSeen(outputs)
        self.has_thawed = "thawed" in recipe.layers
        self.by_token = recipe.loss in ("token-mean", LABELS)
        self.nested = recipe.returns == "nested"

    def forward(self, batch: Batch) -> Any:
        x = self.first(batch["x"] if "x" in batch else batch["tokens"][:, :-1])
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)  # pixels as tokens, channels last
        frozen = self.has_thawed and self.weights_seen(self.head.bias) <= 1
        for layer in self.layers:
            if isinstance(layer, _Dropout):
                x = layer(x, batch["index"])
            else:
                x = layer(x, frozen) if isinstance(layer, _Thawed) else layer(x)
        if x.dim() == 3 and not self.by_token:
            x = x.mean(1)
        return {"logits": self.head(x), "rest": (x,)} if self.nested else self.head(x)


class _Residual(nn.Module):
    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class _Tied(nn.Module):
    """Applies one weight twice, the second time transposed."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, width, bias=False).weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).tanh() @ self.weight


class _Unused(nn.Module):
    """A layer that no forward uses."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


class _WeightsSeen(nn.Module):
    """Counts the distinct weights that a model is trained at. Several micro-batches at the same weights count once."""

    seen: Tensor
    latest: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("latest", torch.zeros(width))

    @torch.no_grad()
    def forward(self, bias: Tensor) -> int:
        """Return the count. ``bias`` must change at every step."""
        if self.training:
            self.seen += (bias != self.latest).any()
            self.latest.copy_(bias)
        return int(self.seen)


class _Thawed(nn.Module):
    """A layer that gets no gradient until the weights have changed once, and gets one afterwards."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, frozen: bool) -> Tensor:
        weight: Tensor = self.inner.weight
        bias: Tensor = self.inner.bias
        if frozen:
            weight, bias = weight.detach(), bias.detach()
        return nn.functional.linear(x, weight, bias)


class _Mixture(nn.Module):
    """A residual mixture of experts: a router chooses the experts of each sample or token."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = Experts(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        return x + self.experts(rows, self.router(rows).relu().square()).view(x.shape)


class _Attention(nn.Module):
    """Attention over the tokens of a sample. For samples without tokens, ``value + query * key``."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        if x.dim() == 2:
            return value + query * key
        return nn.functional.scaled_dot_product_attention(query, key, value)


class _Dropout(nn.Module):
    """Drops half of the units of each sample, chosen by the sample's id and the layer's position."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = KeyedDropout(0)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.masks(x.flatten(1), index).view(x.shape)


class _BatchNorm(nn.Module):
    """BatchNorm with statistics over samples, and over tokens if there are any."""

    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view(x.shape)


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": nn.Linear,
    "tanh": lambda width, size: nn.Tanh(),
    "gelu": lambda width, size: nn.GELU(),
    "layernorm": lambda width, size: nn.LayerNorm(width),
    "batchnorm": _BatchNorm,
    "residual": _Residual,
    "tied": _Tied,
    "attention": _Attention,
    "dropout": lambda width, size: _Dropout(),
    "frozen": lambda width, size: nn.Linear(width, width).requires_grad_(False),
    "unused": _Unused,
    "thawed": _Thawed,
    "experts": _Mixture,
    "adapter": lambda width, size: Adapted(width, width),
}
"""Layer factories by name, called with the input and output widths. All layers but ``linear`` keep the width."""


def _token_mean(outputs: Tensor, batch: Batch) -> Tensor:
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    real = batch["real"].flatten()
    return (losses * real).sum() / real.sum()


def _in_batch(outputs: Tensor, batch: Batch) -> Tensor:
    similarity = outputs @ batch["target"].to(outputs.dtype).T
    return nn.functional.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


_LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "classes": lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["y"]),
    "squares": lambda outputs, batch: nn.functional.mse_loss(outputs, batch["target"]),
    "token-mean": _token_mean,
    "in-batch": _in_batch,
    "two": lambda outputs, batch: _LOSSES["classes"](outputs, batch) + 0.3 * _LOSSES["squares"](outputs, batch),
    LABELS: lambda outputs, batch: nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()),
}


def _optimizers(kind: str, params: list[Any]) -> Iterator[torch.optim.Optimizer]:
    if kind == "sgd":
        yield torch.optim.SGD(params, lr=0.1)
    elif kind == "momentum":
        yield torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
    elif kind == "adam":
        yield torch.optim.Adam(params, lr=0.01)
    elif kind == "adamw":
        yield torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    elif kind == "groups":
        matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
        yield torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}], lr=0.01
        )
    elif kind == "muon":
        yield torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02)
        yield torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.01)
    else:
        yield torch.optim.SGD(params[:1], lr=0.1, momentum=0.9)
        yield torch.optim.Adam(params[1:], lr=0.01)
