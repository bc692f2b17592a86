"""Every hypothesis, by the kind of case that it predicts from. A new file of hypotheses costs one line here.

from plumbline.judge.causes import GradientCase, Hypothesis, register
register(GradientCase, Hypothesis("my-cause", "sync", predict, "…", "…", specificity=600))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plumbline.core.finding import Finding
from plumbline.judge.causes import (
    launch,
    learning_rate,
    metric_hypotheses,
    optimizer_state,
    resumed_progress,
    resumed_state,
    rng,
    samples,
    step_count,
    update,
    validation,
    weights,
)
from plumbline.judge.causes.gradient_hypotheses import (
    amp,
    clipping,
    coupling,
    data,
    meshes,
    micro_batches,
    misplaced_tensors,
    normalisation,
    optimizers,
    stages,
    unused,
)
from plumbline.judge.causes.metric_case import MetricCase
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.hypothesis import Evidence, Hypothesis, explained
from plumbline.judge.mistakes import accumulation, averaging, loss_scale, synchronisation, zeros
from plumbline.judge.mistakes.case import GradientCase

_KNOWN: dict[type, Sequence[Sequence[Hypothesis[Any, Any]]]] = {
    launch.LaunchCase: [launch.HYPOTHESES],
    weights.UnequalStartCase: [weights.UNEQUAL_START],
    weights.InitialWeightsCase: [weights.INITIAL_WEIGHTS],
    weights.PartedRanksCase: [weights.PARTED_RANKS],
    weights.DivergedRanksCase: [weights.DIVERGED_RANKS],
    weights.ChangedWeightsCase: [weights.CHANGED_WEIGHTS],
    samples.EpochSampleCase: [samples.BY_EPOCHS],
    samples.IterationSampleCase: [samples.BY_ITERATIONS],
    step_count.StepCountCase: [step_count.STEP_COUNT],
    step_count.VacuousCase: [step_count.BATCHES_PER_STEP],
    rng.NothingDrawnCase: [rng.NOTHING_DRAWN],
    rng.RedrawnCase: [rng.REDRAWN],
    rng.KeptShareCase: [rng.KEPT_SHARE],
    rng.StreamCase: [rng.STREAMS],
    rng.AlikeMasksCase: [rng.ALIKE_MASKS],
    GradientCase: [
        accumulation.MISTAKES,
        averaging.MISTAKES,
        loss_scale.MISTAKES,
        synchronisation.MISTAKES,
        zeros.MISTAKES,
    ],
    OracleGradientCase: [
        amp.HYPOTHESES,
        clipping.HYPOTHESES,
        coupling.HYPOTHESES,
        data.HYPOTHESES,
        meshes.HYPOTHESES,
        micro_batches.HYPOTHESES,
        misplaced_tensors.HYPOTHESES,
        normalisation.HYPOTHESES,
        optimizers.HYPOTHESES,
        stages.HYPOTHESES,
        unused.HYPOTHESES,
    ],
    learning_rate.LearningRateCase: [learning_rate.OF_ANY_TRAINING],
    learning_rate.ScheduleCase: [learning_rate.OF_A_SCHEDULE],
    update.UpdateCase: [update.HYPOTHESES],
    update.SubjectUpdateCase: [update.OF_SUBJECTS],
    validation.EvaluationCase: [validation.HYPOTHESES],
    MetricCase: [metric_hypotheses.HYPOTHESES],
    resumed_state.StopCase: [resumed_state.STOP],
    resumed_state.OrderCase: [resumed_state.ORDER],
    resumed_state.ResumedWeightsCase: [resumed_state.WEIGHTS],
    resumed_state.ResumedBuffersCase: [resumed_state.BUFFERS],
    resumed_state.ScaleCase: [resumed_state.SCALE],
    resumed_progress.ProgressCase: [resumed_progress.PROGRESS],
    resumed_progress.ResumedRatesCase: [resumed_progress.RATES],
    optimizer_state.OptimizerStateCase: [optimizer_state.HYPOTHESES],
}

HYPOTHESES: dict[type, list[Hypothesis[Any, Any]]] = {
    kind: [one for file in files for one in file] for kind, files in _KNOWN.items()
}
"""The hypotheses about each kind of case, in any order: their specificities decide which is tried first."""


def register(kind: type, *hypotheses: Hypothesis[Any, Any]) -> None:
    """Add hypotheses about a kind of case, which may be new.

    Raises:
        TypeError: the kind of case is left out, or there is no hypothesis.
    """
    if not isinstance(kind, type) or not hypotheses or not all(isinstance(one, Hypothesis) for one in hypotheses):
        raise TypeError("register takes a kind of case, then hypotheses: register(GradientCase, Hypothesis(…))")
    HYPOTHESES.setdefault(kind, []).extend(hypotheses)


def explain(finding: Finding, evidence: Evidence) -> Finding:
    """Return the finding with the cause that the most specific fitting hypothesis names, else ``unexplained``."""
    return explained(finding, hypotheses_about(evidence.kind), evidence)


def hypotheses_about(kind: type) -> list[Hypothesis[Any, Any]]:
    """Return the hypotheses about a kind of case and about its base classes."""
    return [one for each in kind.__mro__ for one in HYPOTHESES.get(each, ())]
