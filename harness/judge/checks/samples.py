"""Which samples were used: every one once an epoch, on one rank, in an order that changes with the epoch.

Where the subject declares that its data comes by iterations, there are no epochs: then ranks must draw by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Step
from harness.judge import sampler_draws as draws
from harness.judge.causes import explain
from harness.judge.causes.samples import sample_case
from harness.judge.error_outcome import Vacuous
from harness.judge.trace_analysis import TraceAnalysis

Used = list[list[int]]
"""Sample ids by step, over all ranks."""


def samples(analysis: TraceAnalysis) -> Finding:
    """Coverage, disjointness, order and reshuffling, from the ids that went through the model's forward."""
    world, expected = analysis.cell.processes, len(analysis.oracle.data)
    used: Used = [[i for step in moment.ranks for i in _forwarded(step)] for moment in analysis.moments]
    if not any(used):
        raise Vacuous("the model was never called with a batch that has an 'index'")
    by_iterations = analysis.conduct.by_iterations
    problem = (
        _windows(analysis)
        or _loss_saw_something_else(analysis)
        or _strangers(used, expected)
        or (_dependent(analysis) if by_iterations else _epochs(analysis, used, expected))
    )
    if problem:
        return explain(Finding("samples", Outcome.FAILED, problem, family="data"), sample_case(analysis))
    if by_iterations:
        message = f"{_full(analysis)} samples in each step, over {world} ranks; by iterations: epochs are not judged"
    else:
        message = f"each of {expected} samples once an epoch, over {world} ranks{_as_declared(analysis)}"
    return Finding("samples", Outcome.PASSED, message)


def _as_declared(analysis: TraceAnalysis) -> str:
    shuffle = analysis.conduct.shuffle
    return "" if shuffle == "job" else f"; the order is that of shuffle={shuffle!r}, which the subject declares"


def _epochs(analysis: TraceAnalysis, used: Used, expected: int) -> str | None:
    """Coverage and order of each epoch."""
    windows, world = analysis.epochs.windows, analysis.cell.processes
    epochs = [used[start : start + windows] for start in range(0, len(used), windows)]
    return (
        next((p for e, epoch in enumerate(epochs) if (p := _coverage(e, epoch, windows, expected, world))), None)
        or _order(epochs, analysis, expected)
        or _shards_kept(analysis, windows)
    )


def _dependent(analysis: TraceAnalysis) -> str | None:
    """Draws that follow from those of another rank, or from those before them."""
    if (again := draws.repeated(analysis)) is not None:
        return f"at step {again[0]} rank {again[1]} draws the samples of the batch before it again"
    if (found := draws.shared(analysis)) is None:
        return None
    when = "over all steps" if found.step is None else f"at step {found.step}"
    return f"{when} ranks {found.first} and {found.second} draw the same samples: {found.count} of {found.places}"


def _full(analysis: TraceAnalysis) -> int:
    """Return how many samples a whole window has over all ranks."""
    return analysis.workload.accumulate * analysis.workload.global_batch_size(analysis.devices)


def _windows(analysis: TraceAnalysis) -> str | None:
    """Every step but the last of an epoch consumes ``accumulate`` whole batches; by iterations every step does."""
    full, world, windows = _full(analysis), analysis.cell.processes, analysis.epochs.windows
    for moment in analysis.moments:
        count = sum(1 for step in moment.ranks for _ in _forwarded(step))
        short = (moment.index + 1) % windows == 0 and count < full + world and not analysis.conduct.by_iterations
        if count != full and not short:
            return f"step {moment.index} consumed {count} samples, not {full}"
    return None


def _loss_saw_something_else(analysis: TraceAnalysis) -> str | None:
    for moment in analysis.moments:
        everybody = sorted(i for step in moment.ranks for i in _forwarded(step))
        for rank, step in enumerate(moment.ranks):
            if any(micro.loss is None for micro in step.micro_batches):
                continue  # a loss of the subject's own
            given = sorted(i for micro in step.micro_batches for i in micro.loss or ())
            seen = sorted(_forwarded(step))
            # A loss over all ranks' gathered outputs is given everybody's samples.
            if given not in (seen, everybody):
                return (
                    f"at step {moment.index} on rank {rank} the loss was given other samples "
                    f"({len(given)}) than went through the model ({len(seen)})"
                )
    return None


def _forwarded(step: Step) -> Iterable[int]:
    return (i for micro in step.micro_batches for i in micro.samples)


def _strangers(used: Used, expected: int) -> str | None:
    for index, step in enumerate(used):
        for sample in step:
            if not 0 <= sample < expected:
                return f"at step {index} sample {sample} was used, which the dataset does not have"
    return None


def _coverage(number: int, epoch: Used, windows: int, expected: int, world: int) -> str | None:
    counts = Counter(i for step in epoch for i in step)
    repeats = sum(counts.values()) - len(counts)
    # DistributedSampler pads the last batch with repeats, fewer than there are ranks.
    if repeats >= max(world, 1):
        sample, times = counts.most_common(1)[0]
        unseen = expected - len(counts)
        return f"in epoch {number} {repeats} draws were repeats (sample {sample} {times} times)" + (
            f": {'ranks share samples, ' if world > 1 else ''}{unseen} of {expected} were never seen" if unseen else ""
        )
    if len(epoch) == windows and len(counts) < expected:
        return f"in epoch {number} {expected - len(counts)} of {expected} samples were never seen"
    return None


def _shards_kept(analysis: TraceAnalysis, windows: int) -> str | None:
    """With shuffling, who draws a sample must change too: else its order depends on the number of devices."""
    if not analysis.shuffles or len(analysis.trace.ranks) == 1:
        return None
    shards = [
        [
            {i for step in trace.steps[start : start + windows] for i in _forwarded(step)}
            for start in range(0, len(trace.steps) - windows + 1, windows)
        ]
        for trace in analysis.trace.ranks
    ]
    if all(len(epochs) > 1 and all(shard == epochs[0] for shard in epochs) for epochs in shards):
        return "every rank draws the samples of the epoch before: shards are fixed and only shuffled inside"
    return None


def _order(epochs: list[Used], analysis: TraceAnalysis, expected: int) -> str | None:
    steps = [[frozenset(step) for step in epoch] for epoch in epochs]
    who = "the workload" if analysis.conduct.shuffle == "job" else "the subject, by its declaration,"
    if analysis.shuffles:
        shared = min(len(epoch) for epoch in steps)
        if len(steps) > 1 and shared > 1 and steps[0][:shared] == steps[1][:shared]:
            return f"epoch 1 has the order of epoch 0 although {who} shuffles"
        return None
    for number, epoch in enumerate(epochs):
        position = 0
        for index, step in enumerate(epoch):
            size = len(set(step))
            ahead = {i % expected for i in range(position, position + size)}
            if set(step) != ahead:
                return (
                    f"at step {index} of epoch {number} the samples are not the next {size} "
                    f"although {who} does not shuffle"
                )
            position += size
    return None
