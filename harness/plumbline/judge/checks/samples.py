"""Was each sample used once per epoch, on one rank, in an order that changes with the epoch?

If the subject declares that its data comes by iterations, there are no epochs, and ranks must draw independently.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from plumbline.core.finding import Finding
from plumbline.judge import independent_draws
from plumbline.judge.causes.samples import sample_case
from plumbline.judge.findings import Vacuous, failed, passed
from plumbline.judge.hypothesis import explain
from plumbline.judge.independent_draws import drawn
from plumbline.judge.oracle.dropout_masks import surprise_limit
from plumbline.judge.trace_analysis import TraceAnalysis

Used = list[tuple[int, ...]]
"""Sample ids by step, over all ranks."""


def samples(analysis: TraceAnalysis) -> Finding:
    """Check coverage, disjointness, order and reshuffling of the ids that went through the model's forward."""
    world, expected = analysis.world, len(analysis.oracle.data)
    used: Used = [tuple(i for step in each.ranks for i in drawn(step)) for each in analysis.steps]
    if not any(used):
        raise Vacuous("the model was never called with a batch that has an 'index'")
    by_iterations = analysis.behavior.by_iterations
    problem = (
        _unlike_members(analysis)
        or _wrong_batch_size(analysis)
        or _loss_of_other_samples(analysis)
        or _unknown_sample(used, expected)
        or (_dependent_draws(analysis) if by_iterations else _epochs(analysis, used, expected))
    )
    if problem:
        return explain(failed("samples", problem, family="data"), sample_case(analysis))
    if by_iterations:
        size = _window_size(analysis)
        return passed(
            "samples", f"{size} samples in each step over {world} ranks, by iterations: epochs are not judged"
        )
    shuffle = analysis.behavior.shuffle
    declared = "" if shuffle == "job" else f"; the order is that of shuffle={shuffle!r}, which the subject declares"
    return passed("samples", f"each of {expected} samples once an epoch, over {world} ranks{declared}")


def _unlike_members(analysis: TraceAnalysis) -> str | None:
    if (found := independent_draws.unlike_members(analysis)) is None:
        return None
    step, first, second = found
    return f"ranks {first} and {second} hold parts of one replica but use different samples at step {step}"


def _epochs(analysis: TraceAnalysis, used: Used, expected: int) -> str | None:
    windows, world = analysis.epochs.windows, analysis.world
    epochs = [used[start : start + windows] for start in range(0, len(used), windows)]
    return (
        next((p for e, epoch in enumerate(epochs) if (p := _coverage(e, epoch, windows, expected, world))), None)
        or _order(epochs, analysis, expected)
        or _shards_kept(analysis, windows)
    )


def _dependent_draws(analysis: TraceAnalysis) -> str | None:
    if (again := independent_draws.repeated(analysis)) is not None:
        return f"a batch has the samples of the batch before it at step {again[0]} on rank {again[1]}"
    if (found := independent_draws.shared(analysis)) is None:
        return None
    when = "over all steps" if found.step is None else f"at step {found.step}"
    ranks = f"ranks {found.first} and {found.second}"
    return f"{ranks} draw the same samples in {found.count} of {found.places} places {when}"


def _window_size(analysis: TraceAnalysis) -> int:
    return analysis.workload.accumulate * analysis.workload.global_batch_size(analysis.devices)


def _wrong_batch_size(analysis: TraceAnalysis) -> str | None:
    size, world, windows = _window_size(analysis), analysis.world, analysis.epochs.windows
    for global_step in analysis.steps:
        count = sum(len(drawn(step)) for step in global_step.ranks)
        is_last = (global_step.index + 1) % windows == 0 and not analysis.behavior.by_iterations
        if count != size and not (is_last and count < size + world):
            return f"step {global_step.index} consumed {count} samples, not {size}"
    return None


def _loss_of_other_samples(analysis: TraceAnalysis) -> str | None:
    for global_step in analysis.steps:
        everybody = sorted(i for step in global_step.ranks for i in drawn(step))
        for rank, step in enumerate(global_step.ranks):
            if any(micro.loss is None for micro in step.micro_batches):
                continue  # a loss of the subject's own
            given = sorted(i for micro in step.micro_batches for i in micro.loss or ())
            seen = sorted(drawn(step))
            # A loss over all ranks' gathered outputs is given all samples.
            if given not in (seen, everybody):
                return (
                    f"the loss was given {len(given)} samples, not the {len(seen)} that went through the model, "
                    f"at step {global_step.index} on rank {rank}"
                )
    return None


def _unknown_sample(used: Used, expected: int) -> str | None:
    for index, step in enumerate(used):
        for sample in step:
            if not 0 <= sample < expected:
                return f"sample {sample} was used at step {index}, but the dataset has samples 0 to {expected - 1}"
    return None


def _coverage(number: int, epoch: Used, windows: int, expected: int, world: int) -> str | None:
    counts = Counter(i for step in epoch for i in step)
    repeats, unseen = sum(counts.values()) - len(counts), expected - len(counts)
    # DistributedSampler pads the last batch with repeats, fewer than there are ranks.
    if repeats >= max(world, 1):
        sample, times = counts.most_common(1)[0]
        message = f"{repeats} draws of epoch {number} were repeats (sample {sample} was drawn {times} times)"
        return f"{message}, and {unseen} of {expected} samples were not drawn" if unseen else message
    if len(epoch) == windows and unseen > 0:
        return f"{unseen} of {expected} samples were never drawn in epoch {number}"
    return None


def _shards_kept(analysis: TraceAnalysis, windows: int) -> str | None:
    """With shuffling, ranks must exchange samples too, or the order depends on the number of devices."""
    if not analysis.shuffles or len(analysis.trace.ranks) == 1:
        return None
    shards = [
        [
            {i for step in trace.steps[start : start + windows] for i in drawn(step)}
            for start in range(0, len(trace.steps) - windows + 1, windows)
        ]
        for trace in analysis.trace.ranks
    ]
    kept = all(len(epochs) > 1 and all(shard == epochs[0] for shard in epochs) for epochs in shards)
    if kept and _beyond_chance([len(epochs[0]) for epochs in shards], len(shards[0]) - 1):
        return "every rank draws the same samples in every epoch: shards are fixed, and only shuffled within"
    return None


def _beyond_chance(sizes: Sequence[int], times: int = 1) -> bool:
    """Return whether chance cannot explain that samples fell into the same sets this often."""
    arrangements = math.lgamma(sum(sizes) + 1) - sum(math.lgamma(size + 1) for size in sizes)
    return times * arrangements > surprise_limit(1)


def _order(epochs: list[Used], analysis: TraceAnalysis, expected: int) -> str | None:
    steps = [[frozenset(step) for step in epoch] for epoch in epochs]
    who = "the workload" if analysis.behavior.shuffle == "job" else "the subject, as it declares,"
    if analysis.shuffles:
        shared = min(len(epoch) for epoch in steps)
        alike = len(steps) > 1 and steps[0][:shared] == steps[1][:shared]
        rest = expected - sum(map(len, steps[0][:shared]))
        if alike and _beyond_chance([*map(len, steps[0][:shared]), max(rest, 0)]):
            return f"epoch 1 has the order of epoch 0, although {who} shuffles"
        return None
    for number, epoch in enumerate(steps):
        position = 0
        for index, step in enumerate(epoch):
            if step != {i % expected for i in range(position, position + len(step))}:
                return (
                    f"at step {index} of epoch {number} the samples are not the next {len(step)} of the dataset, "
                    f"although {who} does not shuffle"
                )
            position += len(step)
    return None
