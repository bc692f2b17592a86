"""Why the optimizer stepped more or less often than it should, or on other windows of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from plumbline.judge.hypothesis import Hypothesis, Match, TraceCase, holds, register
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

StepHypothesis = Hypothesis[TraceCase, Match]


class StepCountCase(TraceCase):
    """A trace with a different number of optimizer steps than the workload's."""


class VacuousCase(TraceCase):
    """A trace in which a check found nothing to judge."""


def _step_counts(case: TraceCase) -> list[int]:
    return [len(trace.steps) for trace in case.analysis.recorded.ranks]


def _some_ranks_never_stepped(case: TraceCase) -> Iterator[Match]:
    counts = _step_counts(case)
    if 0 in counts and any(counts):
        yield Match(rank=counts.index(0), figures={"idle": counts.index(0)})


def _stage_never_stepped(case: TraceCase) -> Iterator[Match]:
    if case.analysis.is_staged:
        yield from _some_ranks_never_stepped(case)


def _stage_stepped_again(case: TraceCase) -> Iterator[Match]:
    if not case.analysis.is_staged:
        return
    without = {
        trace.rank: [index for index, step in enumerate(trace.steps) if not step.micro_batches]
        for trace in case.analysis.recorded.ranks
    }
    again = [rank for rank, steps in without.items() if steps]
    if 0 < len(again) < len(without):
        rank, count = again[0], len(case.analysis.recorded.ranks[again[0]].steps)
        batches = count - len(without[rank])
        if batches:
            yield Match(without[rank][0], rank, {"stage": rank, "count": count, "batches": batches})


def _without_batch(analysis: TraceAnalysis) -> list[GlobalStep]:
    return [global_step for global_step in analysis.steps if not any(step.micro_batches for step in global_step.ranks)]


def _steps_per_batch(case: TraceCase) -> tuple[float, GlobalStep | None]:
    """Return the number of steps per step with a batch, and the first step without one."""
    without = _without_batch(case.analysis)
    with_batch = len(case.analysis.steps) - len(without)
    return len(case.analysis.steps) / with_batch if with_batch else 0.0, without[0] if without else None


def _stepped_by_several_optimizers(case: TraceCase) -> Iterator[Match]:
    _, first = _steps_per_batch(case)
    if first is not None and first.index:
        before = case.analysis.steps[first.index - 1].ranks[0].gradients.keys()
        moved = first.ranks[0].gradients.keys()
        if moved != before and moved & before:
            yield Match(first.index, figures={"shared": len(moved & before)})


def _once_a_rank(case: TraceCase) -> Iterator[Match]:
    """Match if each batch has one step per rank, except with two ranks, which could also each have stepped twice."""
    times, first = _steps_per_batch(case)
    if first is not None and times == case.analysis.world > 2:
        yield Match(first.index, figures={"times": round(times)})


def _stepped_without_a_batch(case: TraceCase) -> Iterator[Match]:
    times, first = _steps_per_batch(case)
    if first is not None:
        unclear = times == case.analysis.world == 2
        more = " (either twice per batch or once per rank: run 3 ranks to tell)" if unclear else ""
        figures = {"count": len(_without_batch(case.analysis)), "total": len(case.analysis.steps), "more": more}
        yield Match(first.index, figures=figures)


def _windows(case: TraceCase) -> tuple[list[int], list[int]] | None:
    """Return how many micro-batches each step of the first rank had, and how many it should have had.

    None if these are equal, or if a micro-batch is not a whole batch of the loader but one device's share, or a part.
    """
    analysis = case.analysis
    if analysis.workload.max_steps is not None:
        return None
    taken = [len(step.micro_batches) for step in analysis.trace.ranks[0].steps]
    expected = list(analysis.epochs.lengths)
    if not taken or taken == expected or not _one_batch_a_micro_batch(analysis):
        return None
    return taken, expected


def _one_batch_a_micro_batch(analysis: TraceAnalysis) -> bool:
    sizes = {
        sum(map(len, micro.forwards))
        for trace in analysis.trace.ranks
        for step in trace.steps
        for micro in step.micro_batches
    }
    full = analysis.workload.global_batch_size(analysis.devices) // analysis.world
    return bool(sizes) and max(sizes) == full


def _windows_where(
    condition: Callable[[TraceAnalysis, list[int], list[int]], bool],
) -> Callable[[TraceCase], Iterator[Match]]:
    """Return the prediction that ``condition`` holds for the micro-batches that steps had and should have had."""

    def predict(case: TraceCase) -> Iterator[Match]:
        windows = _windows(case)
        if windows is not None and condition(case.analysis, *windows):
            pairs = enumerate(zip(*windows, strict=False))
            step = next((index for index, (taken, due) in pairs if taken != due), len(windows[1]) - 1)
            yield Match(step, figures={"taken": _listed(windows[0]), "expected": _listed(windows[1])})

    return predict


def _every_micro_batch(analysis: TraceAnalysis, taken: list[int], due: list[int]) -> bool:
    return analysis.workload.accumulate > 1 and set(taken) == {1} and len(taken) == sum(due)


def _short_last_window_dropped(analysis: TraceAnalysis, taken: list[int], due: list[int]) -> bool:
    window, epochs = analysis.workload.accumulate, analysis.epochs
    return window > 1 and len(taken) == epochs.count * (epochs.batches // window)


def _window_over_the_end(analysis: TraceAnalysis, taken: list[int], due: list[int]) -> bool:
    window, epochs = analysis.workload.accumulate, analysis.epochs
    return window > 1 and len(taken) == epochs.count * epochs.batches // window and set(taken) == {window}


def _other_windows(analysis: TraceAnalysis, taken: list[int], due: list[int]) -> bool:
    # Not if epochs are one batch shorter: then windows are right, and a batch of each epoch is missing.
    shorter = replace(analysis.epochs, batches=analysis.epochs.batches - 1)
    return shorter.accumulate > 1 and taken != list(shorter.lengths)


def _accumulates(analysis: TraceAnalysis, taken: list[int], due: list[int]) -> bool:
    fewer = max(taken) > 1 and sum(taken) <= sum(due) and len(taken) < len(due)
    return analysis.workload.accumulate == 1 and fewer


def _skipped_unseen(analysis: TraceAnalysis, taken: list[int], due: list[int]) -> bool:
    """In float16 some steps are missing, and the next step has their batches, in irregular windows."""
    if not (analysis.cell.arithmetic.scaled and _accumulates(analysis, taken, due)):
        return False
    return taken != list(replace(analysis.epochs, accumulate=max(taken)).lengths)


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")


BATCHES_PER_STEP = (
    StepHypothesis("never-stepped", "optimizer", holds(lambda case: not any(_step_counts(case))),
        "no rank took an optimizer step",
        "call optimizer.step()", 290),
    StepHypothesis("stage-never-stepped", "optimizer", _stage_never_stepped,
        "rank {idle} took no optimizer step, but others did: parameters that only this rank holds were not updated",
        "step the optimizer of every stage", 285),
    StepHypothesis("stage-stepped-again", "optimizer", _stage_stepped_again,
        "rank {stage} took {count} optimizer steps for {batches} batches, but other ranks took one per batch",
        "check whether a stage steps twice, or once for each of its chunks", 283),
    StepHypothesis("some-ranks-never-stepped", "launch", _some_ranks_never_stepped,
        "rank {idle} took no optimizer step, but others did",
        "check that every rank takes part in the training", 280),
    StepHypothesis("parameter-in-several-optimizers", "optimizer", _stepped_by_several_optimizers,
        "{shared} tensors were updated more than once per batch",
        "put each parameter into one optimizer only", 270),
    StepHypothesis("applied-once-a-rank", "averaging", _once_a_rank,
        "the optimizer stepped {times} times per batch, once for each rank",
        "check whether every rank's step is applied on all ranks", 260),
    StepHypothesis("stepped-without-a-batch", "optimizer", _stepped_without_a_batch,
        "{count} of {total} optimizer steps came without a new batch{more}",
        "call optimizer.step() once per batch", 250),
    StepHypothesis("stepped-every-micro-batch", "accumulation", _windows_where(_every_micro_batch),
        "the optimizer stepped after every micro-batch",
        "step after windows of {expected} micro-batches", 240),
    StepHypothesis("short-last-window-dropped", "accumulation", _windows_where(_short_last_window_dropped),
        "no step was taken for the short window at the end of an epoch",
        "step after an epoch's last micro-batch too", 230),
    StepHypothesis("window-over-the-end-of-the-epoch", "accumulation", _windows_where(_window_over_the_end),
        "the count of micro-batches continued from one epoch into the next",
        "step at the end of each epoch, and restart the count", 220),
    StepHypothesis("windows-of-another-length", "accumulation", _windows_where(_other_windows),
        "steps used {taken} instead of {expected} micro-batches",
        "check when the trainer decides that a window is complete", 210),
    StepHypothesis("skipped-unseen", "amp", _windows_where(_skipped_unseen),
        "steps used {taken} batches: some were skipped, but not by a GradScaler, whose skips are recorded",
        "if the trainer has its own loss scaler, call job.skipped() where it skips a step", 207),
    StepHypothesis("accumulates-unasked", "accumulation", _windows_where(_accumulates),
        "steps used {taken} batches, although the workload does not accumulate",
        "check whether the trainer accumulates by default", 200),
)  # fmt: skip
"""Hypotheses about how steps follow batches. They also explain why other checks find nothing, or wrong samples."""
register(VacuousCase, *BATCHES_PER_STEP)


def _ranks_differ(case: TraceCase) -> Iterator[Match]:
    counts = _step_counts(case)
    if len(set(counts)) > 1:
        yield Match(figures={"counts": _listed(counts)})


def _too_many(case: TraceCase) -> Iterator[Match]:
    workload, counts = case.analysis.workload, _step_counts(case)
    due = workload.epochs * workload.steps_per_epoch
    if counts[0] > due:
        yield Match(figures={"due": due})


register(
    StepCountCase,
    *BATCHES_PER_STEP,
    StepHypothesis("ranks-differ-in-steps", "data", _ranks_differ,
        "the ranks took {counts} steps",
        "give every rank the same number of batches", 90),
    StepHypothesis("another-number-of-steps", "optimizer", holds(lambda case: case.analysis.behavior.by_iterations),
        "the subject declares that it trains by iterations",
        "take job.steps optimizer steps, each of job.accumulate batches", 80),
    StepHypothesis("too-many-batches", "data", _too_many,
        "the trainer used more batches than the {due} of all epochs",
        "divide the data among the ranks", 70),
    StepHypothesis("too-few-batches", "data", lambda case: [Match(figures={"due": case.analysis.steps_due})],
        "the batches of all epochs make {due} steps",
        "check which batches of an epoch are left out or enlarged", 60),
)  # fmt: skip
