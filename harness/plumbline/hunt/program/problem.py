"""A failure for the templates of programs: the problem's numbers, its model and its parts as plain torch code."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.hunt.search import OVER_SAMPLES
from plumbline.workloads.experts import EXPERTS
from plumbline.workloads.generated import FEATURES, LABELS, LENGTH, OUTPUTS, SIDE, TEXT, VOCABULARY, Recipe
from plumbline.workloads.parameter_use import RANK

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
    "adapter": (
        f"torch.nn.ModuleList([{_LINEAR}, torch.nn.Linear({{width}}, {RANK}), torch.nn.Linear({RANK}, {{width}})])",
        ["base, down, up = self.{name}", "x = base(x) + up(down(x))"],
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


LOSSES = {
    "classes": "F.cross_entropy(outputs, y)",
    "squares": "F.mse_loss(outputs, y)",
    "token-mean": "F.cross_entropy(outputs.transpose(1, 2), y)",
    "in-batch": "F.cross_entropy(outputs @ y.T, torch.arange(len(y)))",
    "two": "F.cross_entropy(outputs, y) + 0.3 * F.mse_loss(outputs, target)",
    LABELS: "F.cross_entropy(outputs[:, :-1].transpose(1, 2), y[:, 1:])",
}

INPUTS = {
    "features": f"(torch.rand({{rows}}, 1) * torch.randn({{rows}}, {FEATURES})).to(dtype)",
    "images": f"torch.randn({{rows}}, 2, {SIDE}, {SIDE}).to(dtype)",
    "tokens": f"torch.randint({VOCABULARY}, ({{rows}}, {LENGTH}))",
    "sparse-tokens": f"torch.randint({VOCABULARY}, ({{rows}}, {LENGTH}))",
    TEXT: f"torch.randint({VOCABULARY}, ({{rows}}, {LENGTH + 1}))",
}

_CLASSES = f"torch.randint({OUTPUTS}, ({{rows}},))"
_VECTORS = f"torch.randn({{rows}}, {OUTPUTS}).to(dtype)"

TARGETS = {
    "classes": {"y": _CLASSES},
    "squares": {"y": _VECTORS},
    "token-mean": {
        "lengths": f"torch.randint(1, {LENGTH + 1}, ({{rows}}, 1))",
        "y": f"torch.randint({OUTPUTS}, ({{rows}}, {LENGTH})).where(torch.arange({LENGTH}) < lengths, -100)",
    },
    "in-batch": {"y": _VECTORS},
    "two": {"y": _CLASSES, "target": _VECTORS},
    LABELS: {
        "lengths": f"torch.randint(1, {LENGTH + 1}, ({{rows}}, 1))",
        "y": f"x.where(torch.arange({LENGTH + 1}) <= lengths, -100)",
    },
}

OPTIMIZERS = {
    "sgd": ["optimizer = torch.optim.SGD({model}.parameters(), lr=0.1)"],
    "momentum": ["optimizer = torch.optim.SGD({model}.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)"],
    "adam": ["optimizer = torch.optim.Adam({model}.parameters(), lr=0.01)"],
    "adamw": ["optimizer = torch.optim.AdamW({model}.parameters(), lr=0.01, weight_decay=0.1)"],
    "groups": [
        "matrices = [parameter for parameter in {model}.parameters() if parameter.dim() > 1]",
        "vectors = [parameter for parameter in {model}.parameters() if parameter.dim() <= 1]",
        'decayed = {{"params": matrices, "weight_decay": 0.3}}',
        'others = {{"params": vectors, "lr": 0.02, "weight_decay": 0.0}}',
        "optimizer = torch.optim.AdamW([decayed, others], lr=0.01)",
    ],
    "several": [
        "first, *others = {model}.parameters()",
        "optimizers = [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)]",
    ],
    "muon": [
        "matrices = [parameter for parameter in {model}.parameters() if parameter.dim() == 2]",
        "others = [parameter for parameter in {model}.parameters() if parameter.dim() != 2]",
        "optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]",
    ],
}

RATE = "lambda n: min((n + 1) / 3, 0.8 ** (n - 2))"
SCHEDULE = f"torch.optim.lr_scheduler.LambdaLR(optimizer, {RATE})"
COMPARES_WEIGHTS = ("weights", "resumed")
OF_WINDOWS = ("short-last-window-dropped", "micro-batches-missing", "batches-of-another-size")
"""Causes of samples that the loader drew but the trainer did not use: the weights show them."""

SLIGHT = ("slightly-scaled", "scaled-before-clipping")
"""Causes whose effect is hardly larger than rounding in float32."""

ORDERS = 3  # seeds to try if samples are shuffled: a wrong order of a few samples can be right by chance


@dataclass(frozen=True)
class Problem:
    """A recipe on a cell, and the finding there. ``changed`` says, in words after "it", what was changed since."""

    recipe: Recipe
    cell: Cell
    finding: Finding
    changed: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What a program compares: a kind in the table of docs/searching.md, or a check for which there is none."""
        check, cause = self.finding.check, self.finding.cause
        if check == "launch" and cause in ("raised", "hung"):
            return "raised"
        if check == "metrics":
            return "val_loss" if self.finding.message.startswith("val_loss") else "loss"
        if check == "checkpoint" and self.recipe.interrupt_after is not None:
            return "resumed"
        if check == "validation" and "were not evaluated" in self.finding.message:
            return "val_loss"
        # When gradients are accumulated, buffers need not be equal before every forward pass.
        if check == "buffers" and cause == "buffers-not-broadcast" and self.recipe.accumulate == 1:
            return "broadcast"
        # If samples are shuffled, weights cannot be compared.
        of_a_loader = self.recipe.accumulate == 1 or cause not in (None, *OF_WINDOWS)
        if check == "samples" and (of_a_loader or self.recipe.shuffle):
            return "samples"
        return check if check in ("buffers", "precision", "validation", "rng") else "weights"

    @property
    def raises(self) -> bool:
        """Whether the failure is an exception, which the program has to raise too."""
        return self.finding.check == "launch" or self.finding.cause == "interruption-broke"

    @property
    def differences(self) -> str:
        """What the program does differently from the problem that was found, in words after "it"; can be empty."""
        left_out = []
        if self.recipe.validate_every is not None and self.kind in (*COMPARES_WEIGHTS, "loss", "broadcast"):
            left_out.append("evaluations")
        if self.recipe.interrupt_after is not None and self.kind != "resumed":
            left_out.append("the interruption")
        if self.recipe.shuffle and self.kind == "raised":
            left_out.append("shuffling")
        return ", ".join(["leaves out " + " and ".join(left_out)] * bool(left_out) + [*self.changed])

    def visible(self, precisions: Collection[str]) -> Problem:
        """Return the problem to show, changed so that its failure is visible; ``precisions`` are the trainer's."""
        recipe, cell, changed = self.recipe, self.cell, []
        if self.kind == "samples" and recipe.inputs != TEXT:
            recipe = replace(recipe, inputs="features", layers=(), loss="classes", returns="logits")
        if recipe.loss == "in-batch" and self.batch == 1 and self.kind in COMPARES_WEIGHTS:
            recipe = replace(recipe, batch_size=2 * cell.topology.devices)
            changed.append("uses two samples per batch and rank, because an in-batch loss over one sample is zero")
        if self.finding.cause in SLIGHT and cell.precision == "32" and "64" in precisions:
            cell = replace(cell, precision="64")
            changed.append("trains in float64, where rounding hides less")
        return replace(self, recipe=recipe, cell=cell, changed=tuple(changed))

    def orders(self) -> Iterator[Problem]:
        """Yield the problem, and if it is shuffled, the same problem with other seeds."""
        yield self
        for more in range(1, ORDERS if self.recipe.shuffle else 1):
            seed = self.recipe.seed + more
            changed = (*self.changed, f"uses seed {seed}, because the order of another seed is right by chance")
            yield replace(self, recipe=replace(self.recipe, seed=seed), changed=changed)

    @property
    def precision(self) -> str:
        return self.cell.precision

    @property
    def backend(self) -> str:
        return self.cell.backend

    @property
    def ranks(self) -> int:
        return self.cell.processes

    @property
    def shares(self) -> int:
        """Ranks that have samples of their own."""
        return len(self.cell.parallelism.replicas(self.cell.topology))

    @property
    def batch(self) -> int:
        """Samples of one micro-batch on one rank."""
        devices = self.cell.topology.devices
        return ceil(self.recipe.batch_size / devices) * devices // self.shares

    @property
    def samples(self) -> int:
        size = self.batch * self.shares
        most = size - self.cell.topology.devices if self.recipe.steps_per_epoch > 1 else 0
        return self.recipe.steps_per_epoch * size - min(self.recipe.left_out, most)

    @property
    def draws(self) -> int:
        """Samples of an epoch, including those that are drawn twice so that all ranks have the same number."""
        return ceil(self.samples / self.shares) * self.shares

    @property
    def rows(self) -> int:
        """Samples of ``data``: those of an epoch, or held-out ones, which leave an incomplete last batch."""
        if self.kind != "val_loss":
            return self.samples
        if self.recipe.loss not in OVER_SAMPLES:
            raise NotExpressedError("a program cannot express a loss that is not a mean over samples")
        return self.batch * self.shares + 5

    @property
    def shuffles(self) -> bool:
        """Whether the program shuffles. Training by hand cannot, because the order is the trainer's own."""
        if self.recipe.shuffle and self.kind == "weights":
            raise NotExpressedError("a program cannot express shuffled samples, whose order is the trainer's own")
        return self.recipe.shuffle and self.kind != "raised"

    @property
    def stopped_batches(self) -> int:
        """Batches on each rank, over all epochs, before the interruption."""
        assert self.recipe.interrupt_after is not None
        epochs, steps = divmod(self.recipe.interrupt_after, -(-self.recipe.steps_per_epoch // self.recipe.accumulate))
        return epochs * self.recipe.steps_per_epoch + steps * self.recipe.accumulate

    @property
    def find_unused(self) -> bool:
        """Whether DistributedDataParallel must look for parameters that a step leaves unused."""
        return self.ranks > 1 and not {"unused", "thawed"}.isdisjoint(self.recipe.layers)

    @property
    def mesh(self) -> str:
        """Sizes and names of the mesh of processes, as arguments of ``init_device_mesh``."""
        mesh = self.cell.parallelism.mesh(self.cell.topology)
        return f"{mesh.shape}, mesh_dim_names={tuple(mesh.names)}".replace("'", '"')

    @cached_property
    def layers(self) -> list[Layer]:
        return list(layers_of(self.recipe))

    @property
    def adapters(self) -> list[str]:
        """Names of the layers with adapters. If there are any, the program trains nothing else."""
        return [f"layer{number}" for number, word in enumerate(self.recipe.layers, 1) if word == "adapter"]

    @property
    def columns(self) -> dict[str, str]:
        """The variables of ``prepare`` that hold the data, with their values."""
        values = {"x": INPUTS[self.recipe.inputs], **TARGETS[self.recipe.loss]}
        return {name: value.format(rows=self.rows) for name, value in values.items()}

    @property
    def targets(self) -> str:
        return "y, target" if self.recipe.loss == "two" else "y"

    @property
    def loss(self) -> str:
        return LOSSES[self.recipe.loss]

    @property
    def several(self) -> bool:
        return self.recipe.optimizer in ("several", "muon")

    @property
    def scheduled(self) -> bool:
        return self.recipe.schedule != "none"

    @property
    def rate(self) -> str:
        return RATE

    def optimizer(self, model: str, *, scheduled: bool = True) -> str:
        """Return the lines that make ``optimizer`` or ``optimizers``, and ``schedule`` or ``schedules``, if any."""
        lines = [line.format(model=model) for line in OPTIMIZERS[self.recipe.optimizer]]
        if scheduled and self.scheduled:
            several = ["schedules = [", f"    {SCHEDULE}", "    for optimizer in optimizers", "]"]
            lines += several if self.several else [f"schedule = {SCHEDULE}"]
        return "\n".join(lines)

    def step(self, step: str = "optimizer.step()") -> str:
        """Return the lines that ``step`` each optimizer and its schedule, and clear the gradients."""
        lines = [*step.splitlines(), "optimizer.zero_grad()", *["schedule.step()"] * self.scheduled]
        if not self.several:
            return "\n".join(lines)
        head = "for optimizer in optimizers:"
        if self.scheduled:
            head = "for optimizer, schedule in zip(optimizers, schedules, strict=True):"
        return "\n".join([head, *("    " + line for line in lines)])

    def in_shards(self, lines: str) -> str:
        """Return the lines that make optimizers, with the state of each divided among the ranks."""
        return re.sub(r"(torch\.optim\.\w+)\((.+?), (?=lr)", r"ZeroRedundancyOptimizer(\2, \1, ", lines)

    @property
    def scaler(self) -> str:
        """The loss scaler for float16. Its scale prevents overflow of gradients, unless an exception is to be shown."""
        return f'torch.amp.GradScaler("cpu"{"" if self.kind == "raised" else ", init_scale=16.0"})'
