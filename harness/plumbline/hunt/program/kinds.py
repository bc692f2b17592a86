"""What a program without Plumbline has to show of a failure, by the check that failed."""

from __future__ import annotations

from plumbline.core.finding import Finding
from plumbline.workloads.generated import Recipe

COMPARES_WEIGHTS = ("weights", "resumed")
"""Kinds that compare the weights after training."""

OF_WINDOWS = ("short-last-window-dropped", "micro-batches-missing", "batches-of-another-size")
"""Causes why samples are not used that a loader drew: the weights tell, and not the loader."""

IN_WORDS = {
    "loss": "a training loss that is reported",
    "resumed": "an interruption, after which new processes go on",
    "buffers": "buffers, which are no weights",
    "precision": "a precision that is not used",
    "validation": "evaluations, which leave no weights",
    "rng": "random numbers of several ranks",
}
"""What a program would need, by kind, where a template does not show the kind."""


def kind_of(recipe: Recipe, finding: Finding) -> str:
    """Return ``val_loss``, ``broadcast``, ``samples``, ``weights``, ``raised``, or a key of ``IN_WORDS``."""
    if finding.check == "launch" and finding.cause in ("raised", "hung"):
        return "raised"
    if finding.check == "metrics":
        return "val_loss" if finding.message.startswith("val_loss") else "loss"
    if finding.check == "checkpoint" and recipe.interrupt_after is not None:
        return "resumed"
    if finding.check == "validation" and "were not evaluated" in finding.message:
        return "val_loss"
    # Within a window of batches, forwards need not begin alike.
    if finding.check == "buffers" and finding.cause == "buffers-not-broadcast" and recipe.accumulate == 1:
        return "broadcast"
    # Where they are shuffled, no weights can be compared.
    of_a_loader = recipe.accumulate == 1 or finding.cause not in (None, *OF_WINDOWS)
    if finding.check == "samples" and (of_a_loader or recipe.shuffle):
        return "samples"
    return finding.check if finding.check in IN_WORDS else "weights"
