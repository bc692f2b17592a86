"""Why a trainer is wrong: hypotheses predict what a mistake would produce, and are tried on the evidence.

The most specific hypothesis that fits is the cause. If none fits, the finding is ``unexplained`` and keeps its figures.
``plumbline.judge.checks`` decides whether something is wrong. A new file of hypotheses costs one line here.

from plumbline.judge.causes import GradientCase, Hypothesis, register
register(GradientCase, Hypothesis("my-cause", "sync", predict, "…", "…", specificity=600))
"""

from __future__ import annotations

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
    normalisation,
    optimizers,
    parameters,
    stages,
)
from plumbline.judge.causes.metric_case import MetricCase
from plumbline.judge.causes.oracle_gradient_case import OracleGradientCase
from plumbline.judge.hypothesis import HYPOTHESES, Evidence, Hypothesis, Match, explain, register
from plumbline.judge.mistakes import accumulation, scaling, synchronisation
from plumbline.judge.mistakes.case import Combination, GradientCase, SomeParameters

register(launch.LaunchCase, *launch.HYPOTHESES)
register(weights.UnequalStartCase, *weights.UNEQUAL_START)
register(weights.InitialWeightsCase, *weights.INITIAL_WEIGHTS)
register(weights.PartedRanksCase, *weights.PARTED_RANKS)
register(weights.DivergedRanksCase, *weights.DIVERGED_RANKS)
register(weights.ChangedWeightsCase, *weights.CHANGED_WEIGHTS)
register(samples.EpochSampleCase, *samples.BY_EPOCHS)
register(samples.IterationSampleCase, *samples.BY_ITERATIONS)
register(step_count.StepCountCase, *step_count.STEP_COUNT)
register(step_count.VacuousCase, *step_count.BATCHES_PER_STEP)
register(rng.NothingDrawnCase, *rng.NOTHING_DRAWN)
register(rng.RedrawnCase, *rng.REDRAWN)
register(rng.KeptShareCase, *rng.KEPT_SHARE)
register(rng.StreamCase, *rng.STREAMS)
register(rng.AlikeMasksCase, *rng.ALIKE_MASKS)
register(
    GradientCase,
    *accumulation.MISTAKES,
    *scaling.MISTAKES,
    *synchronisation.MISTAKES,
)
register(
    OracleGradientCase,
    *amp.HYPOTHESES,
    *clipping.HYPOTHESES,
    *coupling.HYPOTHESES,
    *data.HYPOTHESES,
    *meshes.HYPOTHESES,
    *normalisation.HYPOTHESES,
    *optimizers.HYPOTHESES,
    *parameters.HYPOTHESES,
    *stages.HYPOTHESES,
)
register(learning_rate.LearningRateCase, *learning_rate.OF_ANY_TRAINING)
register(learning_rate.ScheduleCase, *learning_rate.OF_A_SCHEDULE)
register(update.UpdateCase, *update.HYPOTHESES)
register(update.SubjectUpdateCase, *update.OF_SUBJECTS)
register(validation.EvaluationCase, *validation.HYPOTHESES)
register(MetricCase, *metric_hypotheses.HYPOTHESES)
register(resumed_state.StopCase, *resumed_state.STOP)
register(resumed_state.OrderCase, *resumed_state.ORDER)
register(resumed_state.ResumedWeightsCase, *resumed_state.WEIGHTS)
register(resumed_state.ResumedBuffersCase, *resumed_state.BUFFERS)
register(resumed_state.ScaleCase, *resumed_state.SCALE)
register(resumed_progress.ProgressCase, *resumed_progress.PROGRESS)
register(resumed_progress.ResumedRatesCase, *resumed_progress.RATES)
register(optimizer_state.OptimizerStateCase, *optimizer_state.HYPOTHESES)

__all__ = [
    "HYPOTHESES",
    "Combination",
    "Evidence",
    "GradientCase",
    "Hypothesis",
    "Match",
    "MetricCase",
    "OracleGradientCase",
    "SomeParameters",
    "explain",
    "register",
]
