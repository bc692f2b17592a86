"""A reported value must be the mean that its name stands for; a wrong one is named after what it is the mean of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import Evaluation, Logged, Trace
from plumbline.judge.checks.metrics import metrics
from plumbline.judge.expected_metrics import HELD_OUT, RIGHT, TRAINING, LossMode, LossTable, mean
from plumbline.judge.findings import Vacuous
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import WORKLOADS
from plumbline.workloads.basics import Mlp, Uneven


class Evaluated(Uneven):
    """The perceptron with a short last batch and required reports."""

    needs = frozenset({"metrics"})


class Evidence:
    """A right training on ``world`` ranks, its bookkeeping, and reported values."""

    def __init__(self, simulation, cell, workload=None, precision="32"):
        self.cell, self.workload = cell, workload or Evaluated()
        trace = simulation.right_trace(self.workload, cell)
        count = len(self.workload.val_dataset(cell.topology.devices))
        self.last = len(trace.ranks[0].steps)
        ranks = []
        for rank in trace.ranks:
            own = tuple(range(rank.rank, count, cell.processes))
            places = (self.workload.steps_per_epoch, self.last)
            ranks.append(replace(rank, evaluations=tuple(Evaluation(step, 0, own, False) for step in places)))
        self.trace = Trace(tuple(ranks))

    def saying(self, name, values, rank=0):
        """The same with a rank's reported values, by step."""
        logged = tuple(Logged(step, name, value) for step, value in values.items())
        return [replace(trace, logged=logged) if trace.rank == rank else trace for trace in self.trace.ranks]

    def asked(self, name, values, rank=0):
        """Return the check's findings on them."""
        return metrics(TraceAnalysis(Trace(tuple(self.saying(name, values, rank))), self.workload, self.cell))

    def books(self, name=TRAINING, values=None):
        return LossTable(
            TraceAnalysis(Trace(tuple(self.saying(name, values or {self.last: 0.0}))), self.workload, self.cell)
        )


@pytest.fixture
def evidence(simulation, cell_of):
    def evidence(world=2, precision="32", workload=None):
        cell = cell_of("mlp", "ddp" if world > 1 else "none", f"1x{world}", precision)
        return Evidence(simulation, cell, workload)

    return evidence


def portions(books, *steps):
    return [portion for portion in books.trained(RIGHT[TRAINING]) if portion.step in steps]


def held_out(books, step, later=0, *, training=False):
    return float(books.each((step, 0), LossMode(later, training)).mean())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("precision", ["64", "32", "16", "bf16"])
def test_the_last_step_the_epoch_and_what_came_since_are_all_right(evidence, world, precision):
    here = evidence(world, precision)
    books = here.books()
    for values in (
        {3: mean(portions(books, 2))},
        {3: mean(portions(books, 0, 1, 2)), 6: mean(portions(books, 3, 4, 5))},
        {2: mean(portions(books, 0, 1)), 4: mean(portions(books, 2, 3))},
    ):
        assert here.asked(TRAINING, values).outcome is Outcome.PASSED


def test_the_held_out_mean_is_that_of_the_present_weights(evidence):
    here = evidence(3)
    books = here.books()
    values = {3: held_out(books, 3), 6: held_out(books, 6)}
    assert here.asked(HELD_OUT, values, rank=2).outcome is Outcome.PASSED


def test_any_rank_may_report_and_other_names_are_nobodys_business(evidence):
    here = evidence(2)
    finding = here.asked(TRAINING, {6: mean(portions(here.books(), 5))}, rank=1)
    assert finding.outcome is Outcome.PASSED
    with pytest.raises(Vacuous):
        here.asked("accuracy", {6: 0.5})


def test_what_can_be_judged_is_judged_though_nobody_asked_for_it(simulation, cell_of, evidence):
    here = evidence(2, workload=Mlp())
    assert here.asked(TRAINING, {6: 1.0}).outcome is Outcome.FAILED
    assert here.asked(TRAINING, {}) is None
    tokens = evidence(2, workload=WORKLOADS["lm-tokens"])
    assert tokens.asked(TRAINING, {6: 1.0}) is None, "a mean over tokens is no mean over samples"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_wrong(evidence, value):
    assert evidence(2).asked(TRAINING, {6: value}).outcome is Outcome.FAILED


def plain(values):
    return sum(values) / len(values)


LIES = {
    "one-ranks-own-value": lambda books: {
        step: mean([p for p in portions(books, step - 1) if p.rank == 1]) for step in (3, 6)
    },
    "mean-of-batch-means": lambda books: {
        step: plain([mean(portions(books, s)) for s in range(step - 3, step)]) for step in (3, 6)
    },
    "times-world-size": lambda books: {6: 2 * mean(portions(books, 5))},
    "summed": lambda books: {6: sum(p.loss * len(p.samples) for p in portions(books, 5))},
    "batch-missing": lambda books: {3: mean(portions(books, 1, 2)), 6: mean(portions(books, 4, 5))},
    "never-reset": lambda books: {3: mean(portions(books, 0, 1, 2)), 6: mean(portions(books, 0, 1, 2, 3, 4, 5))},
    "stale": lambda books: {2: mean(portions(books, 0)), 6: mean(portions(books, 3))},
    "rounded": lambda books: {6: round(mean(portions(books, 5)), 3)},
    "of-other-samples": lambda books: {6: held_out(books, 6)},
}  # fmt: skip


@pytest.mark.parametrize("cause", LIES)
def test_a_wrong_loss_is_named(evidence, cause):
    here = evidence(2)
    finding = here.asked(TRAINING, LIES[cause](here.books()))
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, cause, "metrics")


HELD_OUT_LIES = {
    "one-ranks-own-value": lambda losses, books: float(losses[0::3].mean()),
    "mean-of-rank-means": lambda losses, books: plain([float(losses[rank::3].mean()) for rank in range(3)]),
    "times-world-size": lambda losses, books: float(losses.mean()) / 3,
    "part-of-the-samples": lambda losses, books: float(losses[:24].mean()),
    "taken-before-the-step": lambda losses, books: held_out(books, 6, -1),
    "stale": lambda losses, books: held_out(books, 3),
    "of-other-samples": lambda losses, books: mean(portions(books, 5)),
}


@pytest.mark.parametrize("cause", HELD_OUT_LIES)
def test_a_wrong_held_out_loss_is_named(evidence, cause):
    here = evidence(3)
    books = here.books(HELD_OUT)
    finding = here.asked(HELD_OUT, {6: HELD_OUT_LIES[cause](books.each((6, 0), RIGHT[HELD_OUT]), books)})
    assert (finding.outcome, finding.cause, finding.family) == (Outcome.FAILED, cause, "metrics")


def test_padding_that_counts_has_a_name_of_its_own(evidence):
    here = evidence(2)
    first, second = here.trace.ranks
    padded = tuple(replace(e, samples=(*e.samples, 0)) for e in second.evaluations)
    here.trace = Trace((first, replace(second, evaluations=padded)))
    losses = here.books().each((6, 0), RIGHT[HELD_OUT])
    finding = here.asked(HELD_OUT, {6: float((losses.sum() + losses[0]) / (len(losses) + 1))})
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "repeats-counted")


def test_a_batch_that_is_filled_up_and_counts_for_what_is_left_has_a_name_of_its_own(evidence):
    here = evidence(2)
    drawn = ((*range(12), *range(24, 29), *range(7)), (*range(12, 24), *range(7, 19)))
    ranks = [
        replace(rank, evaluations=tuple(replace(e, samples=own) for e in rank.evaluations))
        for rank, own in zip(here.trace.ranks, drawn, strict=True)
    ]
    here.trace = Trace(tuple(ranks))
    losses = here.books().each((6, 0), RIGHT[HELD_OUT])
    last = losses[list(drawn[0][12:])].mean()
    finding = here.asked(HELD_OUT, {6: float((losses[:24].sum() + 5 * last) / 29)})
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, "filled-up-batch-counted")


class Few(Evaluated):
    """Fewer training samples than held-out ones."""

    batch_size, steps_per_epoch, epochs = 10, 1, 1


def test_more_samples_may_be_held_out_than_are_trained_on(evidence):
    found = evidence(workload=Few()).asked(HELD_OUT, {1: 1e6})
    assert (found.outcome, found.cause) == (Outcome.FAILED, "unexplained")


def test_what_is_none_of_these_stays_unexplained(evidence):
    here = evidence(2)
    finding = here.asked(TRAINING, {6: 1.2345 * mean(portions(here.books(), 5))})
    assert (finding.cause, finding.family) == ("unexplained", "metrics")


@pytest.mark.parametrize("workload", ["metrics", "mlp"])
@pytest.mark.parametrize("topology", ["1x2", "1x3"])
def test_a_trainer_whose_rank_zero_speaks_for_all_is_caught(verdict, workload, topology):
    findings, outcome = verdict("everybody-reports-its-own", workload, "ddp", topology)
    assert outcome is Outcome.FAILED
    assert findings["metrics"].cause == "one-ranks-own-value"
    assert [name for name, finding in findings.items() if finding.outcome.is_bad] == ["metrics"]


def test_an_evaluation_with_gradients_enabled_is_an_evaluation(verdict):
    findings, outcome = verdict("evaluates-with-gradients-enabled", "metrics", "ddp", "1x2")
    assert outcome is Outcome.PASSED, findings
    assert findings["validation"].outcome is Outcome.PASSED
