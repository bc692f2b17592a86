"""All questions that are put to a recorded training, in the order in which their answers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.check.evidence.training import RecordedTraining
from harness.check.judge.buffers import judge_buffers
from harness.check.judge.clipping import judge_clipping
from harness.check.judge.consequences import settle
from harness.check.judge.gradients import judge_gradients
from harness.check.judge.initial_weights import judge_initial_weights
from harness.check.judge.learning_rate import judge_learning_rate
from harness.check.judge.lost_ties import judge_lost_ties
from harness.check.judge.objective import judge_objective
from harness.check.judge.optimized_parameters import judge_optimized_parameters
from harness.check.judge.precision import judge_precision
from harness.check.judge.ranks_agree import judge_ranks_agree
from harness.check.judge.recomputation import judge_recomputation
from harness.check.judge.rng import judge_rng
from harness.check.judge.rounded_updates import judge_rounded_updates
from harness.check.judge.samples import judge_samples
from harness.check.judge.skipped_steps import judge_skipped_steps
from harness.check.judge.unused_losses import judge_unused_losses
from harness.check.judge.update import judge_update
from harness.core.finding import Finding, leaves_no_numbers
from harness.core.outcome import Outcome

QUESTIONS: list[Callable[[RecordedTraining], Iterator[Finding]]] = [
    judge_initial_weights,
    judge_samples,
    judge_rng,
    judge_recomputation,
    judge_gradients,
    judge_clipping,
    judge_skipped_steps,
    judge_learning_rate,
    judge_update,
    judge_optimized_parameters,
    judge_ranks_agree,
    judge_buffers,
    judge_precision,
    judge_objective,
    judge_unused_losses,
    judge_lost_ties,
    judge_rounded_updates,
]


def judge(training: RecordedTraining) -> list[Finding]:
    """Return every finding about a training, in the order of the questions, but what leaves no numbers first.

    A question that raises has no answer; it does not hide the others.
    """
    findings: list[Finding] = []
    for question in QUESTIONS:
        try:
            findings.extend(question(training))
        except Exception as error:
            name = question.__name__.removeprefix("judge_").replace("_", "-")
            findings.append(Finding(name, Outcome.ERRORED, f"it could not be judged: {type(error).__name__}: {error}"))
    return sorted(settle(findings), key=lambda one: not leaves_no_numbers(one))
