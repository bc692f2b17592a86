"""All questions that are put to a recorded training, in the order in which their answers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.buffers import judge_buffers
from plumbline.check.judge.clipping import judge_clipping
from plumbline.check.judge.consequences import settle
from plumbline.check.judge.gradients import judge_gradients
from plumbline.check.judge.initial_weights import judge_initial_weights
from plumbline.check.judge.learning_rate import judge_learning_rate
from plumbline.check.judge.lost_ties import judge_lost_ties
from plumbline.check.judge.objective import judge_objective
from plumbline.check.judge.optimized_parameters import judge_optimized_parameters
from plumbline.check.judge.precision import judge_precision
from plumbline.check.judge.ranks_agree import judge_ranks_agree
from plumbline.check.judge.recomputation import judge_recomputation
from plumbline.check.judge.rng import judge_rng
from plumbline.check.judge.rounded_updates import judge_rounded_updates
from plumbline.check.judge.samples import judge_samples
from plumbline.check.judge.skipped_steps import judge_skipped_steps
from plumbline.check.judge.unused_losses import judge_unused_losses
from plumbline.check.judge.update import judge_update
from plumbline.core.finding import Finding, leaves_no_numbers
from plumbline.core.outcome import Outcome

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
