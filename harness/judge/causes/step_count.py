"""Why the optimizer stepped more or less often than it should, or on other windows of micro-batches."""

from __future__ import annotations

from harness.core.finding import Finding
from harness.judge.causes.cause import Cause, explained
from harness.judge.trace_analysis import GlobalStep, TraceAnalysis


def explain(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding about the number of steps with a cause."""
    return explained(finding, pace(analysis), _other_number(analysis))


def explain_vacuous(finding: Finding, analysis: TraceAnalysis) -> Finding:
    """Return a finding that has nothing to look at with the reason why there is nothing, if it is one of these."""
    return explained(finding, pace(analysis))


def pace(analysis: TraceAnalysis) -> Cause | None:
    """Return what is wrong with the rhythm of batches and steps, None if nothing is that these counts could tell."""
    counts = [len(trace.steps) for trace in analysis.trace.ranks]
    if not any(counts):
        return Cause("never-stepped", "optimizer", "is optimizer.step() ever called?")
    if 0 in counts:
        rank = counts.index(0)
        return Cause("some-ranks-never-stepped", "launch", "do all ranks know that they take part?", rank=rank)
    return _steps_without_a_batch(analysis) or _windows(analysis)


def _steps_without_a_batch(analysis: TraceAnalysis) -> Cause | None:
    world = analysis.cell.processes
    idle = [global_step for global_step in analysis.steps if not any(step.micro_batches for step in global_step.ranks)]
    if not idle:
        return None
    busy = len(analysis.steps) - len(idle)
    times, rest = divmod(len(analysis.steps), busy) if busy else (0, 1)
    step = idle[0].index
    if _is_anothers(idle[0], analysis):
        look = "a parameter is stepped more than once for each batch: is it in several optimizers?"
        return Cause("parameter-in-several-optimizers", "optimizer", look, step=step)
    if rest == 0 and times == world > 2:  # of two ranks nobody can tell whether it is twice, or once a rank
        look = f"the optimizer steps {times} times for every batch: once a rank?"
        return Cause("applied-once-a-rank", "averaging", look, step=step)
    look = "the optimizer steps several times for one batch"
    if rest == 0 and times == world == 2:
        look += ": twice, or once a rank? On three ranks it shows"
    return Cause("stepped-without-a-batch", "optimizer", look, step=step)


def _is_anothers(idle: GlobalStep, analysis: TraceAnalysis) -> bool:
    """Say whether a step without a batch moved other parameters than the one before it: an optimizer of their own."""
    if not idle.index:
        return False
    before = analysis.steps[idle.index - 1].ranks[0].gradients.keys()
    return idle.ranks[0].gradients.keys() != before and bool(idle.ranks[0].gradients.keys() & before)


def _windows(analysis: TraceAnalysis) -> Cause | None:
    """Compare the number of batches that went into each step with the workload's windows."""
    workload = analysis.workload
    window, batches, epochs = workload.accumulate, analysis.epochs.batches, analysis.epochs.count
    if workload.max_steps is not None:
        return None
    first = analysis.trace.ranks[0]
    taken = [len(step.micro_batches) for step in first.steps]
    expected = list(analysis.epochs.lengths)
    if taken == expected or not _one_batch_a_micro_batch(analysis):
        return None
    step = next((i for i, (a, b) in enumerate(zip(taken, expected, strict=False)) if a != b), len(expected) - 1)
    if window > 1:
        if set(taken) == {1} and len(taken) == sum(expected):
            look = "the optimizer steps for every micro-batch"
            return Cause("stepped-every-micro-batch", "accumulation", look, step=step)
        if len(taken) == epochs * (batches // window):
            look = "the short window at the end of an epoch is never stepped"
            return Cause("short-last-window-dropped", "accumulation", look, step=step)
        if len(taken) == epochs * batches // window and set(taken) == {window}:
            look = "micro-batches are counted on from one epoch into the next"
            return Cause("window-over-the-end-of-the-epoch", "accumulation", look, step=step)
        look = f"steps consumed {_list(taken)} micro-batches, not {_list(expected)}"
        return Cause("windows-of-another-length", "accumulation", look, step=step)
    if max(taken) > 1 and sum(taken) <= sum(expected) and len(taken) < len(expected):
        look = "several batches make one step, although nobody asked for accumulation"
        return Cause("accumulates-unasked", "accumulation", look, step=step)
    return None


def _one_batch_a_micro_batch(analysis: TraceAnalysis) -> bool:
    """Say whether a recorded micro-batch is a batch of the loader, and not one of a device, or a part of one."""
    sizes = {
        sum(map(len, micro.forwards))
        for trace in analysis.trace.ranks
        for step in trace.steps
        for micro in step.micro_batches
    }
    full = analysis.workload.global_batch_size(analysis.devices) // analysis.cell.processes
    return bool(sizes) and max(sizes) == full


def _other_number(analysis: TraceAnalysis) -> Cause | None:
    counts = [len(trace.steps) for trace in analysis.trace.ranks]
    if len(set(counts)) > 1:
        return Cause("ranks-differ-in-steps", "data", "have all ranks the same number of batches?")
    if analysis.behavior.by_iterations:
        look = "job.steps says how many optimizer steps there are, each of job.accumulate batches"
        return Cause("another-number-of-steps", "optimizer", look)
    more = counts[0] > analysis.workload.epochs * analysis.workload.steps_per_epoch
    if more:
        return Cause("too-many-batches", "data", "is the data divided among the ranks?")
    return Cause("too-few-batches", "data", "which batches of an epoch are left out, or made larger?")


def _list(counts: list[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")
