"""The type of a mistake that is put into copies of scripts, and changes that many mistakes share.

A mistake has changes for each script: patterns and their replacements. For scripts of other people, patterns are as
short as possible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AMP, NANOGPT, ACCELERATE, DDP, BY_HAND, IMAGENET = (
    "ddp-accumulation-amp",
    "nanogpt ddp",
    "accelerate gradient-accumulation",
    "ddp",
    "all-reduce-by-hand",
    "pytorch imagenet ddp",
)
FILES = {
    AMP: "ddp_accumulation_amp.py",
    NANOGPT: "train.py",
    ACCELERATE: "examples/by_feature/gradient_accumulation.py",
    DDP: "ddp.py",
    BY_HAND: "all_reduce_by_hand.py",
    IMAGENET: "imagenet/main.py",
}
"""The changed file of each script."""

Changes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: its name in the tables.
        says: what the mistake is.
        causes: the causes that name it; none if it may be intended, so that nothing may be accused.
        changes: patterns and replacements, by the name of a script.
        steps: the number of optimizer steps that must be recorded to see it; None: as many as requested.
    """

    name: str
    says: str
    causes: tuple[str, ...]
    changes: dict[str, Changes]
    steps: int | None = None


AFTER_BACKWARD = {
    AMP: r"( +)(scaler\.unscale_\(optimizer\)\n)",
    NANOGPT: r"( +)(# clip the gradient\n)",
    ACCELERATE: r"( +)(optimizer\.step\(\)\n)",
    DDP: r"( +)(nn\.utils\.clip_grad_norm_)",
}
"""Where all gradients of a step are complete, before unscaling and clipping; the group is the indentation."""

AFTER_STEP = {
    AMP: r"( +)(scaler\.update\(\)\n)",
    NANOGPT: r"( +)(scaler\.update\(\)\n)",
    ACCELERATE: r"( +)(lr_scheduler\.step\(\)\n)",
    DDP: r"( +)(scheduler\.step\(\)\n)",
}
"""After the optimizer's step."""

WHEN = {AMP: "True", NANOGPT: "True", ACCELERATE: "accelerator.sync_gradients", DDP: "True"}
"""An expression that is true if this iteration ends a window of micro-batches."""


def before_step(statement: str, *names: str) -> dict[str, Changes]:
    """Return the changes that execute a statement when the gradients of a step are complete."""
    return {name: _inserted(AFTER_BACKWARD[name], statement, name) for name in names}


def after_step(statement: str, *names: str) -> dict[str, Changes]:
    """Return the changes that execute a statement after the step."""
    return {name: _inserted(AFTER_STEP[name], statement, name) for name in names}


def _inserted(pattern: str, statement: str, name: str) -> Changes:
    return ((pattern, rf"\1if {WHEN[name]}: {statement}\n\1\2"),)


IGNORE = "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
"""Excludes the named parameters from DDP's reduction."""

GRADIENTS = "[p.grad for p in model.parameters() if p.grad is not None]"


def changed(text: str, changes: Changes) -> str:
    """Return a script's text with a mistake in it.

    Raises:
        ValueError: a pattern is not found.
    """
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise ValueError(f"nothing matches {pattern!r}")
    return text
