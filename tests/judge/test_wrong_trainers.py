"""Known-bad trainers, with real ranks: none of them passes, and the check that should see it does."""

from __future__ import annotations

import pytest

from harness.core.outcome import Outcome

DDP = ("mlp", "ddp", "1x2")
NODES = ("mlp", "ddp", "2x2")
BATCHNORM = ("cnn-batchnorm", "ddp", "1x2")
CONTRASTIVE = ("contrastive", "ddp", "1x2")
TOKENS = ("lm-tokens", "ddp", "1x2")

CAUGHT_BY = {
    ("sum", *DDP): "gradients",
    ("sum", "linear-exact", "ddp", "1x2"): "gradients",
    ("sum", *BATCHNORM): "gradients",
    ("sum", *CONTRASTIVE): "gradients",
    ("sum", *TOKENS): "gradients",
    ("loss-times-world", *DDP): "gradients",
    ("divided-twice", *DDP): "gradients",
    ("divided-twice", "linear-exact", "ddp", "1x3"): "gradients",
    ("first-rank-only", *DDP): "gradients",
    ("clipped-before-the-average", *DDP): "gradients",
    ("compressed-to-bfloat16", *DDP): "gradients",
    ("stale-gradient", *DDP): "gradients",
    ("never-zeroed", *DDP): "gradients",
    ("one-parameter-forgotten", *DDP): "ranks-agree",
    ("one-parameter-forgotten", *NODES): "gradients",
    ("without-synchronization", *DDP): "ranks-agree",
    ("without-synchronization", *BATCHNORM): "gradients",
    ("in-no-sync", "mlp", "ddp", "1x3"): "gradients",
    ("replicas-take-their-own-loss", "contrastive", "dp", "1x2"): "gradients",
    ("replicas-take-their-own-loss", "contrastive", "ddp2", "2x2"): "gradients",
    ("replicas-take-their-own-loss", "lm-tokens", "dp", "1x3"): "gradients",
    ("replicas-one-after-another", "contrastive", "dp", "1x2"): "gradients",
    ("replicas-one-after-another", "lm-tokens", "ddp2", "2x2"): "gradients",
    ("splits-the-batch", "contrastive", "none", "1x1"): "gradients",
    ("splits-the-batch", "cnn-batchnorm", "none", "1x1"): "gradients",
    ("splits-the-batch", *CONTRASTIVE): "gradients",
    ("one-replica-without-gradient", "mlp", "dp", "1x2"): "gradients",
    ("no-sampler", *DDP): "samples",
    ("seed-plus-rank", *DDP): "samples",
    ("set-epoch-never-called", *DDP): "samples",
    ("never-shuffled", *DDP): "samples",
    ("tail-dropped", *DDP): "steps",
    ("local-rank-for-rank", *NODES): "samples",
    ("one-sample-twice", *DDP): "samples",
    ("loss-of-half-the-batch", *DDP): "samples",
    ("labels-out-of-step", *DDP): "gradients",
    ("padded-length", *TOKENS): "gradients",
    ("all-negatives-without-gradient", *CONTRASTIVE): "gradients",
    ("biases-not-broadcast", *DDP): "initial-weights",
    ("biases-not-broadcast", "lm-tokens", "ddp", "1x3"): "ranks-agree",
    ("weights-of-its-own", *DDP): "initial-weights",
    ("wrong-learning-rate", *DDP): "learning-rate",
    ("stepped-twice", *DDP): "steps",
    ("shared-memory", *DDP): "update",
    ("parameter-missing", *DDP): "gradients",
    ("momentum-forgotten", *BATCHNORM): "update",
    ("hidden-decay", *DDP): "training",
    ("shrunk-after-the-last-step", *DDP): "stillness",
    ("buffers-never-broadcast", *BATCHNORM): "buffers",
    ("in-evaluation", *BATCHNORM): "gradients",
    ("everyone-alone", *DDP): "launch",
}

VACUOUS = {"zero-gradient": "update", "zeroed-before-the-step": "update", "frozen": "update", "never-steps": "steps"}


def names(cells):
    return ["-".join(cell) for cell in cells]


@pytest.mark.parametrize("precision", ["32", "64"])
@pytest.mark.parametrize("cell", CAUGHT_BY, ids=names(CAUGHT_BY))
def test_a_wrong_trainer_fails_and_the_right_check_sees_it(verdict, cell, precision):
    findings, outcome = verdict(*cell, precision)
    assert outcome.is_bad
    assert findings[CAUGHT_BY[cell]].outcome is Outcome.FAILED


@pytest.mark.parametrize("precision", ["32", "64"])
@pytest.mark.parametrize("subject", VACUOUS)
def test_where_nothing_moves_there_is_no_verdict(verdict, subject, precision):
    findings, outcome = verdict(subject, *DDP, precision)
    assert outcome is Outcome.ERRORED
    assert findings[VACUOUS[subject]].outcome is Outcome.ERRORED
    assert "vacuous" in findings[VACUOUS[subject]].message


@pytest.mark.parametrize(
    ("subject", "check", "precision"),
    [
        ("scaled-step", "gradients", "16"),
        ("infinities-ignored", "gradients", "16"),
        ("infinities-ignored", "update", "16"),
        ("decided-alone", "ranks-agree", "16"),
        ("moves-when-skipped", "training", "16"),
        ("skips-for-nothing", "skipped-steps", "16"),
        ("sum", "gradients", "16"),
        ("sum", "gradients", "bf16"),
        ("without-synchronization", "gradients", "16"),
        ("without-synchronization", "gradients", "bf16"),
        ("silently-float32", "gradients", "64"),
        ("silently-bfloat16", "gradients", "32"),
    ],
)
def test_a_wrong_precision_fails(verdict, subject, check, precision):
    findings, outcome = verdict(subject, *DDP, precision)
    assert outcome is Outcome.FAILED
    assert findings[check].outcome is Outcome.FAILED


def test_numbers_that_are_not_finite_have_an_error_without_bounds(verdict):
    findings, _ = verdict("infinities-ignored", *DDP, "16")
    assert findings["gradients"].error_x_noise == float("inf")
    assert findings["ranks-agree"].outcome is Outcome.PASSED, "all ranks hold the same infinities"


def test_an_order_that_depends_on_the_number_of_devices_fails(verdict):
    findings, _ = verdict("shard-kept-for-ever", *DDP)
    assert findings["samples"].outcome is Outcome.FAILED
    assert (findings["samples"].family, findings["samples"].cause) == ("data", "shards-kept")


@pytest.mark.parametrize("precision", ["16", "bf16"])
def test_a_precision_that_is_ignored_fails(verdict, precision):
    findings, _ = verdict("precision-ignored", *DDP, precision)
    assert findings["precision"].outcome is Outcome.FAILED


def test_a_wrong_rank_is_named(verdict):
    findings, _ = verdict("biases-not-broadcast", *DDP)
    assert findings["initial-weights"].rank == 1
    assert findings["initial-weights"].parameter.endswith("bias")


def test_a_forgotten_parameter_is_named(verdict):
    findings, _ = verdict("parameter-missing", *DDP)
    assert findings["gradients"].parameter == "layers.2.bias"
