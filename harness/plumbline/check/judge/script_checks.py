"""The checks of a script, and what they find in the trainings that its processes recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plumbline.check.evidence.read import read_trainings
from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.buffers import judge_buffers
from plumbline.check.judge.clipping import judge_clipping
from plumbline.check.judge.coverage import Coverage, coverage_of
from plumbline.check.judge.discarded_passes import without_discarded_passes
from plumbline.check.judge.documents import judge_documents
from plumbline.check.judge.estimate import CostEstimate, estimate
from plumbline.check.judge.experts import judge_experts
from plumbline.check.judge.frozen_weights import judge_frozen_weights
from plumbline.check.judge.generator_states import judge_generator_states
from plumbline.check.judge.gradients import judge_gradients
from plumbline.check.judge.learning_rate import judge_learning_rate
from plumbline.check.judge.likely_mistakes import (
    judge_gathered_outputs,
    judge_lost_ties,
    judge_rounded_updates,
    judge_unused_losses,
)
from plumbline.check.judge.loss_scales import with_own_loss_scales
from plumbline.check.judge.noted import not_judged
from plumbline.check.judge.objective import judge_objective
from plumbline.check.judge.optimized_parameters import judge_optimized_parameters
from plumbline.check.judge.precision_used import judge_precision_used
from plumbline.check.judge.ranks_agree import judge_initial_weights, judge_ranks_agree, without_excuse
from plumbline.check.judge.recomputation import judge_recomputation
from plumbline.check.judge.resplit import Rerun, judge_resplit
from plumbline.check.judge.resumption import CHECK as RESUMPTION
from plumbline.check.judge.resumption import judge_resumption
from plumbline.check.judge.rows_used import judge_rows_used
from plumbline.check.judge.skipped_steps import judge_skipped_steps
from plumbline.check.judge.uneven_ranks import judge_uneven_ranks
from plumbline.check.judge.update import judge_update
from plumbline.core.finding import Finding, in_reading_order
from plumbline.judge.checks import CHECKS
from plumbline.judge.consequences import SCRIPT_RULES
from plumbline.judge.judge import KINDS, Kind, judge

CHECKS[RecordedTraining] |= {
    "initial-weights": judge_initial_weights,
    "samples": judge_rows_used,
    "rng": judge_generator_states,
    "recomputation": judge_recomputation,
    "gradients": judge_gradients,
    "clipping": judge_clipping,
    "skipped-steps": judge_skipped_steps,
    "learning-rate": judge_learning_rate,
    "update": judge_update,
    "optimized-parameters": judge_optimized_parameters,
    "frozen-weights": judge_frozen_weights,
    "uneven-ranks": judge_uneven_ranks,
    "ranks-agree": judge_ranks_agree,
    "buffers": judge_buffers,
    "precision": judge_precision_used,
    "objective": judge_objective,
    "unused-losses": judge_unused_losses,
    "gathered-outputs": judge_gathered_outputs,
    "experts": judge_experts,
    "documents": judge_documents,
    "lost-ties": judge_lost_ties,
    "rounded-updates": judge_rounded_updates,
}
KINDS[RecordedTraining] = Kind(SCRIPT_RULES, same_cause=False)


@dataclass(frozen=True)
class CheckedTraining:
    """One training of a command, its findings in reading order, and the cost ``estimate`` of a dry run."""

    training: RecordedTraining
    findings: list[Finding]
    coverage: Coverage
    estimate: CostEstimate | None = None


def judged_trainings(folder: Path) -> list[CheckedTraining]:
    """Return the trainings that were recorded below a folder, each with its findings.

    It raises ``TraceError`` if evidence cannot be read.
    """
    known = (with_own_loss_scales(without_discarded_passes(one)) for one in read_trainings(folder))
    return [_judged(one, folder) for one in known]


def with_resplit(checked: Sequence[CheckedTraining], rerun: Rerun) -> list[CheckedTraining]:
    """Return trainings with the finding about their first step, trained again with a different split of its samples."""
    found = judge_resplit([one.training for one in checked], rerun)
    return [replace(one, findings=[*one.findings, found]) for one in checked]


def with_resumption(
    first: Sequence[RecordedTraining],
    checked: Sequence[CheckedTraining],
    whole: Sequence[RecordedTraining],
    interrupted: int,
    obstacle: str = "",
) -> list[CheckedTraining]:
    """Return resumed trainings with findings on how they differ from the uninterrupted ``whole`` one.

    ``first`` was interrupted after ``interrupted`` steps. ``obstacle`` says why they cannot be compared; "" if nothing
    prevents it.
    """
    resumed = [one.training for one in checked]
    found = [not_judged(RESUMPTION, obstacle)] if obstacle else [*judge_resumption(first, resumed, whole, interrupted)]
    return [replace(one, findings=in_reading_order([*one.findings, *found])) for one in checked]


def _judged(training: RecordedTraining, folder: Path) -> CheckedTraining:
    findings = without_excuse(judge(training))
    return CheckedTraining(training, findings, coverage_of(training, findings), estimate(training, folder))
