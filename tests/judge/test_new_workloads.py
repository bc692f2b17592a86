"""Every narrow workload brings to light what it is there for, and accuses no right trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.outcome import Outcome
from harness.workloads import WORKLOADS

MISTAKES = Path(__file__).parent / "subjects_new" / "mistakes.py"

# trainer, workload, backend, topology, precision: the check that sees it, and the families that explain it.
# Without a family: the mistake is none of those that are known by name, so that it may go unexplained.
EXPOSED = {
    ("short-window-divided-by-the-full-length", "accumulation", "ddp", "1x3", "32"): ("gradients", "accumulation"),
    ("short-window-dropped", "accumulation", "none", "1x1", "32"): ("steps", "accumulation data"),
    ("tokens-of-the-last-micro-batch", "accumulation-tokens", "none", "1x1", "32"): (
        "gradients",
        "loss-normalisation accumulation",
    ),
    ("never-clipped", "clipping", "none", "1x1", "32"): ("gradients", "clipping"),
    ("clipped-before-unscaling", "clipping", "ddp", "1x3", "16"): ("gradients", "clipping"),
    ("clipped-before-the-average", "clipping", "ddp", "1x3", "32"): ("gradients", "clipping"),
    ("never-clipped", "clipping-adamw", "ddp", "1x3", "64"): ("gradients", "clipping"),
    ("clipped-before-the-average", "clipping-adamw", "ddp", "1x3", "32"): ("gradients", "clipping"),
    ("scheduled-once-an-epoch", "schedule", "none", "1x1", "32"): ("learning-rate", "optimizer"),
    ("scheduled-for-every-micro-batch", "schedule-windows", "ddp", "1x3", "32"): ("learning-rate", "optimizer"),
    ("moments-lost", "adam", "none", "1x1", "32"): ("update", "optimizer"),
    ("loss-times-world", "adam", "ddp", "1x3", "32"): ("gradients", "averaging"),
    ("one-group", "adamw", "none", "1x1", "32"): ("update", "optimizer"),
    ("moments-lost", "adamw", "ddp", "1x3", "64"): ("update", "optimizer"),
    ("evaluation-wipes-gradients", "validation", "ddp", "1x3", "32"): ("gradients", "accumulation"),
    ("stays-in-evaluation", "validation", "none", "1x1", "32"): ("gradients", ""),
    ("evaluates-in-training", "validation", "none", "1x1", "32"): ("buffers", "buffers"),
    ("reports-a-sum", "metrics", "ddp", "1x3", "32"): ("metrics", "metrics"),
    ("always-shuffles", "sequential", "none", "1x1", "32"): ("samples", "data"),
    ("contiguous-shards", "sequential", "ddp", "1x3", "32"): ("samples", "data"),
    ("tail-dropped", "uneven", "none", "1x1", "32"): ("steps", "data"),
    ("padded-to-whole-batches", "uneven", "ddp", "1x3", "32"): ("samples", "data"),
    ("never-drops", "dropout", "none", "1x1", "32"): ("gradients", "rng"),
    ("seeded-alike", "random-masks", "ddp", "1x3", "32"): ("rng", "rng"),
    ("never-drops", "random-masks", "none", "1x1", "32"): ("rng", "rng"),
    ("second-never-steps", "several-optimizers", "none", "1x1", "32"): ("gradients", "optimizer"),
    ("only-first-zeroed", "several-optimizers", "ddp", "1x3", "32"): ("gradients", "accumulation"),
    ("zeros-for-frozen", "thawed", "ddp", "1x3", "32"): ("gradients", "unused-params"),
    ("index-of-another-order", "dropout", "ddp", "1x3", "32"): ("gradients", ""),
    ("untied", "transformer", "none", "1x1", "32"): ("gradients", ""),
    ("tied-averaged-twice", "transformer", "ddp", "1x3", "32"): ("gradients", "averaging"),
    ("sparse-summed", "embedding-sparse", "ddp", "1x3", "32"): ("gradients", "averaging"),
    ("sparse-left-out", "embedding-sparse", "ddp", "1x3", "16"): ("gradients", "sync"),
    ("scalars-summed", "nested-outputs", "dp", "1x3", "32"): ("gradients", ""),
    ("first-devices-rest", "nested-outputs", "dp", "1x3", "16"): ("gradients", ""),
    ("thawed", "frozen", "none", "1x1", "32"): ("gradients", "optimizer"),
    ("zeros-for-frozen", "frozen", "ddp", "1x3", "32"): ("update", "optimizer"),
    ("unused-divided-by-their-users", "unused-parameters", "ddp", "1x3", "32"): ("gradients", "unused-params"),
    ("unused-not-looked-for", "unused-at-the-end", "ddp", "1x3", "32"): ("gradients", "unused-params"),
    ("decided-alone", "overflow", "ddp", "1x3", "16"): ("ranks-agree", "amp"),
    ("overflow-ignored", "overflow", "ddp", "1x3", "16"): ("gradients", "amp"),
    ("scheduled-when-skipped", "overflow-schedule", "ddp", "1x3", "16"): ("learning-rate", "amp optimizer"),
}


@pytest.mark.parametrize("cell", EXPOSED, ids=["-".join(cell[:3]) for cell in EXPOSED])
def test_the_mistake_is_seen_and_named(verdict, cell):
    subject, *place = cell
    check, families = EXPOSED[cell]
    findings, outcome = verdict(subject, *place, locator=MISTAKES)
    assert outcome is Outcome.FAILED, findings
    assert findings[check].outcome is Outcome.FAILED, findings
    assert not families or findings[check].family in families.split(), findings[check]


def test_every_narrow_workload_exposes_something():
    exposing = {workload for _, workload, *_ in EXPOSED}
    # Those that are interrupted have tests of their own: test_checkpoint.py.
    narrow = {name for name, workload in WORKLOADS.items() if workload.narrow}
    assert exposing == {name for name in narrow if WORKLOADS[name].interrupt_after is None}


NOT_ONE_DEVICE = {("accumulation-tokens", "ddp"), ("validation", "ddp")}
"""Workloads and backends under which a mean of rank means, or a rank's own statistics, are the contract."""


@pytest.mark.parametrize("cell", EXPOSED, ids=["-".join(cell[:3]) for cell in EXPOSED])
def test_the_same_trainer_without_the_mistake_is_right(verdict, cell):
    place = cell[1:]
    findings, outcome = verdict("replicas" if "dp" in place else "loop", *place, locator=MISTAKES)
    assert outcome is (Outcome.DEVIATES if place[:2] in NOT_ONE_DEVICE else Outcome.PASSED), findings
