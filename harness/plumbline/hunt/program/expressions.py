"""What recipes are made of, in source code: layers, targets, losses, optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable

from plumbline.workloads.experts import EXPERTS
from plumbline.workloads.generated import LABELS, LENGTH, OUTPUTS

CROSS_ENTROPY = "torch.nn.functional.cross_entropy"
MSE = "torch.nn.functional.mse_loss"


def _class(name: str, base: str, *lines: str) -> str:
    return f"class {name}(torch.nn.{base}):\n    def forward(self, x):\n" + "\n".join(f"        {one}" for one in lines)


LAYERS = {
    "linear": "torch.nn.Linear({width}, {size})",
    "tanh": "torch.nn.Tanh()",
    "gelu": "torch.nn.GELU()",
    "layernorm": "torch.nn.LayerNorm({width})",
    "batchnorm": "{made}({width})",
    "residual": "{made}({width}, {width})",
    "tied": "tied := torch.nn.Linear({width}, {width}, bias=False), torch.nn.Tanh(), tied",
    "attention": "{made}({width}, 3 * {width})",
    "frozen": "torch.nn.Linear({width}, {width}).requires_grad_(False)",
    "thawed": "{made}({width})",
    "experts": f"{{made}}({{width}}, {EXPERTS} * {{width}} + {EXPERTS})",
}

_CHUNKS = "query, key, value = super().forward(x).chunk(3, -1)"

CLASSES = {
    "_Pixels": _class("_Pixels", "Conv2d", "return super().forward(x).flatten(2).transpose(1, 2)"),
    "_Residual": _class("_Residual", "Linear", "return x + super().forward(x).tanh()"),
    "_BatchNorm": _class("_BatchNorm", "BatchNorm1d", "return super().forward(x.flatten(0, -2)).view(x.shape)"),
    # A scale for each unit. The bias is trained from the first step on, and tells of it: it begins at zero.
    "_Thawed": _class(
        "_Thawed",
        "LayerNorm",
        "scale = self.weight if self.bias.any() else self.weight.detach()",
        "return x * scale + self.bias",
    ),
    # All experts' weights, and the router's, are one matrix: what a gate of zero leaves out has gradients of zero.
    "_Experts": _class(
        "_Experts",
        "Linear",
        f"gates, outputs = super().forward(x).tensor_split(({EXPERTS},), -1)",
        f"return x + (gates.relu().square().unsqueeze(-1) * outputs.unflatten(-1, ({EXPERTS}, -1))).sum(-2)",
    ),
    "_Product": _class("_Product", "Linear", _CHUNKS, "return value + query * key"),
    "_Attention": _class(
        "_Attention", "Linear", _CHUNKS, "return torch.nn.functional.scaled_dot_product_attention(query, key, value)"
    ),
    "_Nested": _class(
        "_Nested",
        "Sequential",
        "hidden = torch.nn.Sequential(*self[:-1])(x)",
        'return {"logits": self[-1](hidden), "rest": (hidden,)}',
    ),
}

TARGETS: dict[str, Callable[[int], list[str]]] = {
    "classes": lambda count: [f"torch.randint({OUTPUTS}, ({count},))"],
    "squares": lambda count: [f"torch.randn({count}, {OUTPUTS})"],
    "token-mean": lambda count: [
        f"torch.randint({OUTPUTS}, ({count}, {LENGTH}))"
        f".where(torch.arange({LENGTH}) < torch.randint(1, {LENGTH + 1}, ({count}, 1)), -100)"
    ],
    "in-batch": lambda count: [f"torch.randn({count}, {OUTPUTS})"],
    "two": lambda count: [f"torch.randint({OUTPUTS}, ({count},))", f"torch.randn({count}, {OUTPUTS})"],
    LABELS: lambda count: [
        f"x.where(torch.arange({LENGTH + 1}) <= torch.randint(1, {LENGTH + 1}, ({count}, 1)), -100)"
    ],
}

LOSSES: dict[str, Callable[[str, str, str, str], str]] = {
    "classes": lambda first, again, y, target: f"{CROSS_ENTROPY}({first}, {y})",
    "squares": lambda first, again, y, target: f"{MSE}({first}, {y})",
    "token-mean": lambda first, again, y, target: f"{CROSS_ENTROPY}({first}.transpose(1, 2), {y})",
    "in-batch": lambda first, again, y, target: f"{CROSS_ENTROPY}({first} @ {y}.T, torch.arange(len({y})))",
    "two": lambda first, again, y, target: f"{CROSS_ENTROPY}({first}, {y}) + 0.3 * {MSE}({again}, {target})",
    LABELS: lambda first, again, y, target: f"{CROSS_ENTROPY}({first}[:, :-1].transpose(1, 2), {y}[:, 1:])",
}
"""Losses over the expression that computes the outputs, one for their further use, and the columns of the batch."""

SCHEDULE = "torch.optim.lr_scheduler.LambdaLR({}, lambda n: min((n + 1) / 3, 0.8 ** (n - 2)))"

OPTIMIZERS = {
    "sgd": "optimizer = torch.optim.SGD({model}.parameters(), lr=0.1)",
    "momentum": "optimizer = torch.optim.SGD({model}.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)",
    "adam": "optimizer = torch.optim.Adam({model}.parameters(), lr=0.01)",
    "adamw": "optimizer = torch.optim.AdamW({model}.parameters(), lr=0.01, weight_decay=0.1)",
    "groups": (
        "matrices, vectors = ([p for p in {model}.parameters() if (p.dim() > 1) is one] for one in (True, False))\n"
        'groups = [{{"params": matrices, "weight_decay": 0.3}}, '
        '{{"params": vectors, "lr": 0.02, "weight_decay": 0.0}}]\n'
        "optimizer = torch.optim.AdamW(groups, lr=0.01)"
    ),
    "several": (
        "weights = list({model}.parameters())\n"
        "optimizers = [torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9), torch.optim.Adam(weights[1:], lr=0.01)]"
    ),
}
