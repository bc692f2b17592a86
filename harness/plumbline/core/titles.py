"""Titles of causes and findings for readers. Files for programs keep the causes' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

TITLES: Final[Mapping[str, str]] = {
    "accumulates-unasked": "accumulated, although the workload does not accumulate",
    "activations-of-another-micro-batch": "activations are those of another micro-batch",
    "another-ranks-gradient": "gradients are those of a single rank",
    "applied-once-a-rank": "the update is applied once for each rank",
    "averaged-over-its-users": "averaged only over the ranks that use a parameter",
    "backward-wrong": "the backward is not the derivative of the forward",
    "batch-again": "a batch is used twice",
    "batch-again-after-resuming": "a batch is used again after resuming",
    "batch-left-out-after-resuming": "a batch is left out after resuming",
    "broken": "the launch failed",
    "clipped-although-nobody-asked": "gradients are clipped, but should not be",
    "computed-in-tf32": "computed in TF32",
    "coupled-otherwise": "samples depend on each other in another way",
    "died": "a rank died",
    "drops-another-share": "dropout drops another share",
    "drops-everything": "dropout drops everything",
    "exchanged-otherwise": "the mistake is in what ranks exchange",
    "hung": "a rank hangs",
    "infinities-zeroed": "infinite gradients are set to zero",
    "initialised-anew": "weights are initialised again",
    "in-evaluation-mode": "the model trains in evaluation mode",
    "interruption-broke": "the interrupted training failed",
    "layers-drop-alike": "several layers draw the same mask",
    "local-rank-for-rank": "the local rank is used as the rank",
    "lost-on-the-way-back": "a gradient is lost in the backward",
    "moved-when-skipped": "weights moved in a skipped step",
    "never-drops": "dropout never drops anything",
    "never-reset": "a metric is never reset",
    "never-shuffled": "samples are never shuffled",
    "never-stepped": "the optimizer never steps",
    "no-sampler": "the data loader has no distributed sampler",
    "no-space": "no space left on the device",
    "node-rank-for-rank": "the node's rank is used as the rank",
    "nothing-but-experts-trained": "only experts are trained",
    "of-other-samples": "computed from other samples",
    "of-the-holders-samples": "computed from the samples of the rank that holds it",
    "one-ranks-own-value": "a metric covers one rank only",
    "order-of-its-own": "samples have another order",
    "port-in-use": "the port is in use",
    "raised": "an exception was raised",
    "ranks-alike": "ranks draw the same samples",
    "ranks-evaluate-alike": "all ranks evaluate the same samples",
    "rate-zero": "the learning rate is zero",
    "repeats-counted": "samples that pad the shares are counted again",
    "replicas-draw-alike": "the devices of a process draw the same masks",
    "scale-not-lowered": "the loss scale is not lowered",
    "scaler-gone": "the gradient scaler is not restored",
    "schedule-gone": "the learning rate schedule is not restored",
    "seeded-anew-every-epoch": "the generator is seeded again in each epoch",
    "seeded-anew-every-micro-batch": "the generator is seeded again in each micro-batch",
    "seeded-anew-every-step": "the generator is seeded again in each step",
    "set-epoch-never-called": "set_epoch is never called",
    "shards-kept": "each rank keeps its shard in all epochs",
    "skipped-for-nothing": "a step is skipped without need",
    "skipped-unseen": "steps are skipped without a GradScaler",
    "some-ranks-seeded-alike": "some ranks are seeded alike",
    "some-tensors-averaged-twice": "some gradients are averaged twice",
    "some-tensors-multiplied": "some gradients are multiplied by a factor",
    "some-tensors-summed": "some gradients are summed over ranks, not averaged",
    "some-tensors-weighted-wrongly": "some gradients are weighted wrongly",
    "some-zero": "some gradients are zero",
    "stage-wrong": "the gradients of a stage are wrong",
    "stale": "a metric is that of an earlier step",
    "stale-where-unused": "gradients of unused parameters are those of an earlier step",
    "state-begun-anew": "the optimizer's state begins again",
    "summed": "a metric is a sum, not a mean",
    "times-batches": "multiplied by the number of batches",
    "times-loss-scale": "multiplied by the loss scale",
    "times-window": "multiplied by the number of micro-batches",
    "times-world-size": "multiplied by the number of ranks",
    "unused-somewhere-stepped-nowhere": "missing where a rank does not use a parameter",
}
"""Titles of causes whose names do not read well without their hyphens."""

_WRONG: Final[Mapping[str, str]] = {
    "buffers": "buffers are wrong",
    "gradients": "gradients are wrong",
    "initial-weights": "the initial weights are wrong",
    "learning-rate": "the learning rate is wrong",
    "metrics": "metrics are wrong",
    "ranks-agree": "ranks hold different weights",
    "rng": "random numbers are wrong",
    "samples": "samples are wrong",
    "steps": "the number of steps is wrong",
    "training": "the final weights are wrong",
    "update": "the update is wrong",
    "validation": "the validation is wrong",
}


def title_of(cause: str) -> str:
    """Return what a cause is called within a sentence: ``not synchronised``, ``some gradients are zero``."""
    return TITLES.get(cause) or cause.replace("-", " ")


def unexplained_title(check: str) -> str:
    """Return what a failure without a known cause is called within a sentence."""
    return f"{_WRONG.get(check, f'{check} failed')}, cause unknown"


def heading(title: str) -> str:
    """Return a title as a heading. A first word that is code stays as it is."""
    first = title.partition(" ")[0].rstrip(",:;")
    return title[:1].upper() + title[1:] if first.replace("-", "").isalnum() and first.islower() else title
