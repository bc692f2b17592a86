"""Why the optimizer stepped more or less often than it should, or on other windows of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plumbline.judge.hypothesis import Hypothesis, Match, TraceCase, holds
from plumbline.judge.trace_analysis import GlobalStep, TraceAnalysis

StepHypothesis = Hypothesis[TraceCase, Match]


class StepCountCase(TraceCase):
    """A trace with another number of optimizer steps than the workload's."""


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
    """Some ranks stepped without a new batch, and the others that hold the same model did not."""
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
    """Return the steps before which no rank had a batch since the step before."""
    return [global_step for global_step in analysis.steps if not any(step.micro_batches for step in global_step.ranks)]


def _steps_per_batch(case: TraceCase) -> tuple[float, GlobalStep | None]:
    """Return how many steps there are for each step with a batch, and the first step without one."""
    without = _without_batch(case.analysis)
    with_batch = len(case.analysis.steps) - len(without)
    return len(case.analysis.steps) / with_batch if with_batch else 0.0, without[0] if without else None


def _stepped_by_several_optimizers(case: TraceCase) -> Iterator[Match]:
    """A step without a batch moved other parameters than the step before it, and some of the same."""
    _, first = _steps_per_batch(case)
    if first is not None and first.index:
        before = case.analysis.steps[first.index - 1].ranks[0].gradients.keys()
        moved = first.ranks[0].gradients.keys()
        if moved != before and moved & before:
            yield Match(first.index, figures={"shared": len(moved & before)})


def _once_a_rank(case: TraceCase) -> Iterator[Match]:
    """Every batch is followed by as many steps as there are ranks; with two ranks that could be twice as well."""
    times, first = _steps_per_batch(case)
    if first is not None and times == case.analysis.world > 2:
        yield Match(first.index, figures={"times": round(times)})


def _stepped_without_a_batch(case: TraceCase) -> Iterator[Match]:
    times, first = _steps_per_batch(case)
    if first is not None:
        unclear = times == case.analysis.world == 2
        more = " (twice, or once a rank? Three ranks would tell)" if unclear else ""
        figures = {"count": len(_without_batch(case.analysis)), "total": len(case.analysis.steps), "more": more}
        yield Match(first.index, figures=figures)


def _windows(case: TraceCase) -> tuple[list[int], list[int]] | None:
    """Return how many micro-batches each step of the first rank had, and how many it should have had.

    None where these are the same, or where micro-batches are no batches of the loader: those of a device, or parts.
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
    """Say whether a recorded micro-batch is a batch of the loader, and not one of a device, or a part of one."""
    sizes = {
        sum(map(len, micro.forwards))
        for trace in analysis.trace.ranks
        for step in trace.steps
        for micro in step.micro_batches
    }
    full = analysis.workload.global_batch_size(analysis.devices) // analysis.world
    return bool(sizes) and max(sizes) == full


def _window_match(taken: list[int], expected: list[int]) -> Match:
    """Return a match at the first step with another number of micro-batches."""
    step = next((i for i, (a, b) in enumerate(zip(taken, expected, strict=False)) if a != b), len(expected) - 1)
    return Match(step, figures={"taken": _listed(taken), "expected": _listed(expected)})


def _every_micro_batch(case: TraceCase) -> Iterator[Match]:
    if case.analysis.workload.accumulate > 1 and (windows := _windows(case)):
        taken, expected = windows
        if set(taken) == {1} and len(taken) == sum(expected):
            yield _window_match(taken, expected)


def _short_last_window_dropped(case: TraceCase) -> Iterator[Match]:
    window, epochs = case.analysis.workload.accumulate, case.analysis.epochs
    if window > 1 and (windows := _windows(case)) and len(windows[0]) == epochs.count * (epochs.batches // window):
        yield _window_match(*windows)


def _window_over_the_end(case: TraceCase) -> Iterator[Match]:
    window, epochs = case.analysis.workload.accumulate, case.analysis.epochs
    if window > 1 and (windows := _windows(case)):
        taken, expected = windows
        if len(taken) == epochs.count * epochs.batches // window and set(taken) == {window}:
            yield _window_match(taken, expected)


def _other_windows(case: TraceCase) -> Iterator[Match]:
    epochs = case.analysis.epochs
    shorter = replace(epochs, batches=epochs.batches - 1)  # windows are right, and a batch of each epoch is missing
    if epochs.accumulate > 1 and (windows := _windows(case)) and windows[0] != list(shorter.lengths):
        yield _window_match(*windows)


def _accumulates_unasked(case: TraceCase) -> Iterator[Match]:
    if case.analysis.workload.accumulate == 1 and (windows := _windows(case)):
        taken, expected = windows
        if max(taken) > 1 and sum(taken) <= sum(expected) and len(taken) < len(expected):
            yield _window_match(taken, expected)


def _skipped_unseen(case: TraceCase) -> Iterator[Match]:
    """In float16 some steps are missing, and their batches are the next step's, in no regular windows."""
    analysis = case.analysis
    if not (analysis.cell.arithmetic.scaled and analysis.workload.accumulate == 1 and (windows := _windows(case))):
        return
    taken, expected = windows
    regular = list(replace(analysis.epochs, accumulate=max(taken)).lengths)
    if max(taken) > 1 and taken != regular and sum(taken) <= sum(expected) and len(taken) < len(expected):
        yield _window_match(taken, expected)


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")


BATCHES_PER_STEP = (
    StepHypothesis("never-stepped", "optimizer", holds(lambda case: not any(_step_counts(case))),
        "no rank made an optimizer step",
        "is optimizer.step() called?", 290),
    StepHypothesis("stage-never-stepped", "optimizer", _stage_never_stepped,
        "rank {idle} made no optimizer step, but others did: what it alone holds was not updated",
        "does every stage step its own optimizer?", 285),
    StepHypothesis("stage-stepped-again", "optimizer", _stage_stepped_again,
        "rank {stage} made {count} optimizer steps for {batches} batches, but other ranks one for each",
        "does a stage step twice, or once for each of its chunks?", 283),
    StepHypothesis("some-ranks-never-stepped", "launch", _some_ranks_never_stepped,
        "rank {idle} made no optimizer step, but others did",
        "do all ranks take part in the training?", 280),
    StepHypothesis("parameter-in-several-optimizers", "optimizer", _stepped_by_several_optimizers,
        "{shared} tensors were stepped more than once for a batch",
        "is a parameter in several optimizers?", 270),
    StepHypothesis("applied-once-a-rank", "averaging", _once_a_rank,
        "the optimizer stepped {times} times for every batch, as often as there are ranks",
        "is every rank's step applied on all ranks?", 260),
    StepHypothesis("stepped-without-a-batch", "optimizer", _stepped_without_a_batch,
        "{count} of {total} optimizer steps came without a new batch{more}",
        "is optimizer.step() called several times for one batch?", 250),
    StepHypothesis("stepped-every-micro-batch", "accumulation", _every_micro_batch,
        "the optimizer stepped after every micro-batch",
        "step after windows of {expected} micro-batches", 240),
    StepHypothesis("short-last-window-dropped", "accumulation", _short_last_window_dropped,
        "the short window at the end of an epoch was never stepped",
        "step after an epoch's last micro-batch too", 230),
    StepHypothesis("window-over-the-end-of-the-epoch", "accumulation", _window_over_the_end,
        "the count of micro-batches continued from one epoch into the next",
        "step at the end of each epoch and start to count again", 220),
    StepHypothesis("windows-of-another-length", "accumulation", _other_windows,
        "steps used {taken} micro-batches, not {expected}",
        "when does the trainer decide that a window is complete?", 210),
    StepHypothesis("skipped-unseen", "amp", _skipped_unseen,
        "steps used {taken} batches: some were skipped, and not by a GradScaler, of which that would be recorded",
        "does the trainer have a loss scaler of its own? Call job.skipped() where it skips a step", 207),
    StepHypothesis("accumulates-unasked", "accumulation", _accumulates_unasked,
        "steps used {taken} batches, although the workload does not accumulate",
        "does the trainer accumulate by default?", 200),
)  # fmt: skip
"""How batches and steps follow each other; also why other checks find nothing, or the wrong samples."""


def _ranks_differ(case: TraceCase) -> Iterator[Match]:
    counts = _step_counts(case)
    if len(set(counts)) > 1:
        yield Match(figures={"counts": _listed(counts)})


def _too_many(case: TraceCase) -> Iterator[Match]:
    workload, counts = case.analysis.workload, _step_counts(case)
    due = workload.epochs * workload.steps_per_epoch
    if counts[0] > due:
        yield Match(figures={"due": due})


def _too_few(case: TraceCase) -> Iterator[Match]:
    yield Match(figures={"due": case.analysis.steps_due})


STEP_COUNT = (
    *BATCHES_PER_STEP,
    StepHypothesis("ranks-differ-in-steps", "data", _ranks_differ,
        "ranks took {counts} steps, by rank",
        "have all ranks the same number of batches?", 90),
    StepHypothesis("another-number-of-steps", "optimizer", holds(lambda case: case.analysis.behavior.by_iterations),
        "the subject declares that it trains by iterations",
        "take job.steps optimizer steps, each of job.accumulate batches", 80),
    StepHypothesis("too-many-batches", "data", _too_many,
        "there were more batches than the {due} of all epochs",
        "is the data divided among the ranks?", 70),
    StepHypothesis("too-few-batches", "data", _too_few,
        "the batches of all epochs make {due} steps",
        "which batches of an epoch are left out, or made larger?", 60),
)  # fmt: skip
