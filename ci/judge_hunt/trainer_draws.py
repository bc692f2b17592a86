"""Right trainers as data: different ways to write the same training, drawn with a problem and a cell."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from plumbline.core.cell import Cell
from plumbline.core.topology import Topology
from plumbline.hunt.search import recipes
from plumbline.subjects.declare import CAPABILITIES
from plumbline.workloads.generated import Recipe

OWN_REDUCTIONS = (
    "flat", "per-parameter", "chunks", "tree", "ring", "scatter-gather", "gather", "from-one-rank", "in-the-backward",
)  # fmt: skip
"""Hand-written averages, from ``reductions.py``."""

HOOKS = ("none", "allreduce", "gather", "sum-then-divide")
"""Communication hooks of DDP that do not change the result."""

SAMPLERS = ("distributed", "strided", "contiguous", "rotated", "reversed")
NEVER_DRAWN = frozenset({"checkpoint", "metrics", "nested-outputs"})
"""Capabilities that recipes cannot express, or that need more than one training."""

WITH_MOMENTUM = ("momentum", "several")
"""The recipes' optimizers that are SGD with momentum. Fused, it is wrong in float16: if the GradScaler skips the first
step, momentum starts with uninitialised memory (torch 2.13; reports/judge-hunt.md)."""


@dataclass(frozen=True)
class TrainerDraw:
    """One way to write a training loop; all drawn combinations compute the same gradients and updates.

    Args:
        reduction: ``ddp``, ``none`` (one device), or one of ``OWN_REDUCTIONS``.
        divided: what a hand-written reduction divides by the number of ranks: the ``loss``, the gradients ``before``
            the sum, or the sum (``after``).
        chunk: the number of entries that the reduction ``chunks`` sends together.
        sync: the micro-batches of a window after which DDP averages: the ``last``, ``every`` one, or every ``odd`` one
            and the last.
        accumulation: ``loss`` divides each loss by the window, ``gradient`` divides their sum, ``one-backward`` has one
            backward for the sum of the losses, ``own-sum`` adds what ``autograd.grad`` returns.
        zero: whether gradients are set to ``none`` or to ``zero`` after a step, by the ``model``, or ``before`` the
            next backward.
        implementation: of the optimizer: as the workload makes it (``given``), ``foreach``, ``fused`` or ``for-loop``.
        sampler: how a batch's samples are divided among the ranks, and in which order.
        clipping: by ``torch``, by ``foreach`` or by ``hand``.
        evaluation: the ``whole`` held-out set on every rank, or ``shares`` of it.
    """

    reduction: str = "none"
    divided: str = "after"
    chunk: int = 7
    bucket_cap_mb: float = 25.0
    static_graph: bool = False
    bucket_view: bool = False
    find_unused: bool = False
    hook: str = "none"
    sync: str = "last"
    accumulation: str = "loss"
    zero: str = "none"
    implementation: str = "given"
    sampler: str = "distributed"
    clipping: str = "torch"
    evaluation: str = "whole"
    broadcast_at_start: bool = False


@dataclass(frozen=True)
class Draw:
    """A trainer, its problem, and its cell, whose workload is a placeholder."""

    trainer: TrainerDraw
    recipe: Recipe
    cell: Cell


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Draw a right trainer with a problem that it can train."""
    ranks = draw(st.sampled_from([2, 2, 2, 3, 3, 1]))
    precision = draw(st.sampled_from(["32", "32", "64", "bf16", "16"]))
    cell = Cell("drawn", "", "ddp" if ranks > 1 else "none", Topology(1, ranks), precision, "cpu")
    recipe = draw(_problems(ranks))
    trainer = draw(trainers(recipe, ranks))
    if precision == "16" and recipe.optimizer in WITH_MOMENTUM and trainer.implementation == "fused":
        trainer = replace(trainer, implementation="foreach")
    return Draw(trainer, recipe, cell)


@st.composite
def _problems(draw: st.DrawFn, ranks: int) -> Recipe:
    """Draw a recipe that trains in well under a second: at most 12 samples a step, and 8 batches."""
    recipe = draw(recipes(CAPABILITIES - NEVER_DRAWN))
    # The drawn trainers do not support parameters that are used only in some steps.
    recipe = replace(recipe, layers=tuple(one for one in recipe.layers if one not in ("thawed", "experts")))
    size = max(recipe.batch_size % 12, 2 * ranks)
    left_out = 0 if "batchnorm" in recipe.layers else recipe.left_out  # BatchNorm needs two samples per device
    return replace(recipe, batch_size=size, left_out=left_out)


@st.composite
def trainers(draw: st.DrawFn, recipe: Recipe, ranks: int) -> TrainerDraw:
    """Draw a trainer that is right for the recipe on this number of ranks."""
    sparse, unused = recipe.inputs == "sparse-tokens", "unused" in recipe.layers
    reduction = draw(st.sampled_from(["ddp", "ddp", "ddp", *OWN_REDUCTIONS])) if ranks > 1 else "none"
    ddp, sync, static, find_unused = reduction == "ddp", "last", False, False
    if ddp:
        sync = draw(st.sampled_from(["last", "every", "odd"]))
        # A static graph needs a reduction in each of the first backward passes.
        static = draw(st.booleans()) and (recipe.accumulate == 1 or sync == "every")
        find_unused = not static and (unused or draw(st.booleans()))
    ways = ["loss", "gradient"]
    if not ddp and reduction != "in-the-backward" and not sparse:
        ways.append("own-sum")
        # Each forward changes buffers in place, which a backward over several forwards does not allow.
        ways += ["one-backward"] if "batchnorm" not in recipe.layers else []
    return TrainerDraw(
        reduction=reduction,
        divided=draw(st.sampled_from(["after", "before", "loss"])),
        chunk=draw(st.integers(1, 40)),
        bucket_cap_mb=draw(st.sampled_from([1e-5, 1e-4, 1e-3, 25.0])),
        static_graph=static,
        bucket_view=draw(st.booleans()) and not sparse,
        find_unused=find_unused,
        hook=draw(st.sampled_from(HOOKS)) if ddp and not sparse else "none",
        sync=sync,
        accumulation=draw(st.sampled_from(ways)),
        zero=draw(st.sampled_from(["none", "zero", "model", "before"])),
        implementation="given" if sparse else draw(st.sampled_from(["given", "foreach", "fused", "for-loop"])),
        sampler=draw(st.sampled_from(SAMPLERS)),
        clipping=draw(st.sampled_from(["torch", "foreach", "hand"])),
        evaluation=draw(st.sampled_from(["whole", "shares"])),
        broadcast_at_start=draw(st.booleans()),
    )
