"""Why a training that was resumed is not the one that was interrupted: what was not saved, or not loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from harness.core.finding import Finding
from harness.evidence.trace import Tensors
from harness.judge.causes.cause import Cause, explained
from harness.judge.causes.learning_rate import rates_at, same_rates
from harness.judge.interrupted_training import Draws, Interruption
from harness.judge.trace_analysis import same


def explain_stop(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about a launch that stopped elsewhere than it had to with a cause."""
    trace = interruption.saved.trace.ranks[finding.rank or 0]
    count, due = len(trace.steps), interruption.workload.interrupt_after
    if count == interruption.total:
        look = "it went on to the end: is job.stop_after_step looked at?"
        return explained(finding, Cause("never-stopped", "checkpoint", look))
    if sum(len(step.micro_batches) for step in trace.steps) == due:
        look = "job.stop_after_step counts optimizer steps, not micro-batches"
        return explained(finding, Cause("stopped-elsewhere", "checkpoint", look))
    if count and count % interruption.epoch_length == 0:
        look = "checkpoints are due in the middle of an epoch too"
        return explained(finding, Cause("stopped-elsewhere", "checkpoint", look))
    return explained(finding, Cause("stopped-elsewhere", "checkpoint", "what does it count, and from where?"))


def explain_order(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about launches that do not have the same order of samples to begin with with a cause."""
    if interruption.workload.elastic:
        look = "the order must follow from seed and epoch, and not from the number of devices"
        return explained(finding, Cause("order-depends-on-the-devices", "data", look))
    look = "every launch draws an order of its own: is it seeded with job.seed and the epoch?"
    return explained(finding, Cause("order-of-each-launch", "data", look))


def explain_weights(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about the weights before the first resumed step with a cause."""
    ranks = {trace.rank: trace.steps[0].before for trace in interruption.resumed.trace.ranks if trace.steps}
    found, left, start = ranks[finding.rank or 0], interruption.left(0)[0], interruption.whole.start
    right = [rank for rank, begun in ranks.items() if any(same(begun, own) for own in interruption.left(rank))]
    return explained(
        finding,
        _on_some_ranks(right, len(ranks)),
        _of_another_step(found, interruption),
        _as_at_the_start(found, start, "weights-not-loaded", "these are job.model()'s: is the model's state loaded?"),
        _rounded(found, left),
        _partly(found, left, start, "weights-partly-loaded"),
        Cause("weights-not-restored", "checkpoint", "what was saved, and what became of it when it was loaded?"),
    )


def explain_buffers(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about the buffers before the first resumed step with a cause."""
    found = interruption.resumed.trace.ranks[finding.rank or 0].steps[0].buffers
    left = interruption.origin(0).final_buffers
    start = interruption.whole.steps[0].ranks[0].buffers
    steps = interruption.origin(0).steps
    stale = next((step for step, other in enumerate(steps) if step and same(other.buffers, found)), None)
    look = "they are those of the beginning: is the model's whole state_dict saved and loaded, or its parameters alone?"
    return explained(
        finding,
        _as_at_the_start(found, start, "buffers-not-restored", look),
        None if stale is None else Cause("buffers-of-another-step", "checkpoint", f"they are those of step {stale}"),
        _rounded(found, left),
        _partly(found, left, start, "buffers-partly-restored"),
        Cause("buffers-not-restored", "checkpoint", "are buffers saved where weights are?"),
    )


def explain_progress(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about the resumed steps with a cause: where in the uninterrupted training they would belong."""
    counts = {len(trace.steps) for trace in interruption.resumed.trace.ranks}
    if len(counts) > 1:
        look = "ranks resumed at different places: do all of them read how far training had come?"
        return explained(finding, Cause("progress-on-some-ranks", "checkpoint", look))
    return explained(finding, *_progress(interruption))


def explain_rates(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about the resumed learning rates with a cause: a way through the schedule that gives them."""
    rank = finding.rank or 0
    used = [step.learning_rates for step in interruption.resumed.trace.ranks[rank].steps if not step.skipped]
    ways = (
        way
        for way, places in _ways(interruption, rank, len(used))
        if same_rates(used, rates_at(places, interruption.whole))
    )
    base = [tuple(float(group["lr"]) for group in interruption.whole.oracle.optimizer().param_groups)] * len(used)
    return explained(
        finding,
        next(ways, None),
        Cause("schedule-gone", "checkpoint", "is there a schedule after resuming?") if same_rates(used, base) else None,
        Cause("rates-not-restored", "checkpoint", "are schedule and optimizer loaded, in which order?"),
    )


def explain_scale(finding: Finding, interruption: Interruption) -> Finding:
    """Return a finding about the resumed loss scale with a cause."""
    rank, index = finding.rank or 0, (finding.step or 0) - interruption.place
    scale = interruption.resumed.steps[index].ranks[rank].scale
    initial, last = interruption.whole.steps[0].ranks[rank].scale, interruption.origin(rank).steps[-1].scale
    if scale is None:
        cause = Cause("scaler-gone", "checkpoint", "is there a GradScaler after resuming?")
    elif scale == initial:
        cause = Cause(
            "scale-not-restored", "checkpoint", "it is the first one: is the GradScaler's state saved, loaded?"
        )
    elif scale == last:
        cause = Cause("scale-of-the-step-before", "checkpoint", "is the GradScaler saved after its update?")
    else:
        cause = Cause("scale-not-restored", "checkpoint", "is the GradScaler's whole state saved and loaded?")
    return explained(finding, cause)


def _on_some_ranks(right: list[int], world: int) -> Cause | None:
    if not 0 < len(right) < world:
        return None
    look = f"only {_ranks(right)} loaded what was saved: every rank must, or be given it"
    wrong = next(rank for rank in range(world) if rank not in right)
    return Cause("loaded-on-some-ranks", "checkpoint", look, rank=wrong)


def _of_another_step(found: Tensors, interruption: Interruption) -> Cause | None:
    """Weights that were there before a step of the launch that saved; those before the first are the job's own."""
    for step, own in enumerate(interruption.origin(0).steps):
        if step and same(own.before, found):
            ago = interruption.place - step
            look = f"they are those of {ago} step{'s' if ago > 1 else ''} before: was it saved after the step?"
            return Cause("weights-of-another-step", "checkpoint", look)
    return None


def _as_at_the_start(found: Tensors, start: Tensors, name: str, look: str) -> Cause | None:
    return Cause(name, "checkpoint", look) if same(found, start) else None


def _rounded(found: Tensors, left: Tensors) -> Cause | None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        if same(found, {name: _as(value, dtype) for name, value in left.items()}):
            bits = str(dtype).removeprefix("torch.")
            return Cause(
                "rounded-when-saved", "checkpoint", f"they went through {bits}: save what is trained, as it is"
            )
    return None


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype) if value.is_floating_point() else value


def _partly(found: Tensors, left: Tensors, start: Tensors, name: str) -> Cause | None:
    """Some tensors are those that were left, and the others those of the beginning."""
    lost = [key for key, value in left.items() if key not in found or not value.equal(found[key])]
    if len(lost) == len(left) or not all(_equal(key, found, start) for key in lost):
        return None
    return Cause(name, "checkpoint", f"{_names(lost)} as at the beginning, the others as they were left")


def _equal(name: str, left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return name in left and name in right and left[name].equal(right[name])


def _progress(interruption: Interruption) -> Iterator[Cause | None]:
    whole, _, resumed = interruption.draws
    place, epoch, total = interruption.place, interruption.epoch_begin, interruption.total
    if not resumed:
        look = "is a training that was interrupted taken for one that is done?"
        yield Cause("nothing-resumed", "checkpoint", look)
        return
    begin = next((step for step, draws in enumerate(whole) if draws == resumed[0]), None)
    if begin == place:
        yield _another_end(resumed, whole[place:])
    elif begin == 0 and len(resumed) >= total:
        look = "all epochs are trained again: are the epoch and the place in it saved, and loaded?"
        yield Cause("trained-all-over-again", "checkpoint", look)
    elif begin == epoch:
        look = "the epoch begins again: skip the batches that were trained on before the interruption"
        yield Cause("position-not-restored", "checkpoint", look)
    elif begin in (0, place - epoch):
        look = "these are the first epoch's samples, in its order: is the epoch restored, and set_epoch told it?"
        yield Cause("epoch-not-restored", "checkpoint", look)
    elif begin is not None:
        yield _counted_otherwise(begin, interruption)
        yield _another_place(begin, place)
    yield _between_steps(resumed[0], whole)
    look = "the order is no epoch's of the uninterrupted training: which seed, which epoch is the sampler told?"
    yield Cause("order-drawn-anew", "checkpoint", look)


def _another_end(resumed: tuple[Draws, ...], due: tuple[Draws, ...]) -> Cause | None:
    """It goes on at the right place, and ends at another one."""
    if resumed[: len(due)] == due:
        look = "it goes on too long: are epochs, or steps, counted anew after resuming?"
        return Cause("too-many-steps-left", "checkpoint", look)
    if due[: len(resumed)] == resumed:
        look = "it ends too early: are epochs, or steps, of before the interruption counted twice?"
        return Cause("too-few-steps-left", "checkpoint", look)
    later = next((step for step, (used, right) in enumerate(zip(resumed, due, strict=False)) if used != right), 0)
    look = f"it goes on rightly and is lost after {later} steps: are batches skipped once more?"
    return Cause("order-lost-later", "checkpoint", look)


def _counted_otherwise(begin: int, interruption: Interruption) -> Cause | None:
    """The place in the epoch as one would find it with another unit: a rank's samples, steps for batches."""
    then, now = interruption.saved.cell.processes, interruption.whole.cell.processes
    position, found = interruption.place - interruption.epoch_begin, begin - interruption.epoch_begin
    if then != now and found == position * now // then:
        look = f"what one of {then} ranks had is skipped by each of {now}: count samples over all ranks"
        return Cause("position-of-each-rank", "checkpoint", look)
    window = interruption.workload.accumulate
    if window > 1 and found in (position // window, position * window):
        look = "optimizer steps were taken for batches, or batches for steps"
        return Cause("position-in-other-units", "checkpoint", look)
    return None


def _another_place(begin: int, place: int) -> Cause:
    if begin == place - 1:
        look = "the last step's samples are used again: is a step counted before it is saved?"
        return Cause("batch-again-after-resuming", "checkpoint", look)
    if begin == place + 1:
        look = "a step's samples are left out: is a step counted twice?"
        return Cause("batch-left-out-after-resuming", "checkpoint", look)
    look = f"it goes on at step {begin}: in which unit, and from where, is the place counted?"
    return Cause("resumed-elsewhere", "checkpoint", look)


def _between_steps(first: Draws, whole: tuple[Draws, ...]) -> Cause | None:
    """Part of one step's samples, and part of the next one's."""
    for left, right in pairwise(whole):
        if set(first) <= set(left) | set(right) and set(first) & set(left) and set(first) & set(right):
            look = "it goes on between two steps: in which unit is the place counted?"
            return Cause("position-in-other-units", "checkpoint", look)
    return None


def _ways(interruption: Interruption, rank: int, count: int) -> Iterator[tuple[Cause, list[int]]]:
    """Yield what a mistake is called, and at which place of the schedule it is at each resumed step."""
    attempts = interruption.place
    taken = sum(not step.skipped for step in interruption.origin(rank).steps)
    again, look = list(range(count)), "the schedule begins again: is the scheduler's state saved, and loaded?"
    yield Cause("scheduler-not-restored", "checkpoint", look), again
    # Its optimizer has kept the rate until the schedule sets it.
    yield Cause("scheduler-not-restored", "checkpoint", look), [taken, *again[1:]]
    look = "the first step has the first rate, which the optimizer holds: is the optimizer's state loaded?"
    yield Cause("rate-not-restored", "checkpoint", look), [0, *(taken + step for step in again[1:])]
    look = "the schedule is a step ahead: is it stepped once more when it is made, or loaded?"
    yield Cause("scheduler-stepped-once-too-often", "checkpoint", look), [taken + step + 1 for step in again]
    look = "the schedule is a step behind: is it saved after it was stepped?"
    for places in ([taken + step - 1 for step in again], [taken, *(taken + step - 1 for step in again[1:])]):
        yield Cause("scheduler-a-step-behind", "checkpoint", look), places
    look = "steps that the GradScaler skipped count as taken: load the scheduler's own state"
    for places in ([attempts + step for step in again], [taken, *(attempts + step for step in again[1:])]):
        if attempts != taken:
            yield Cause("scheduler-counts-skipped-steps", "checkpoint", look), places
    look = "the schedule stands still: does it step the optimizer that is used after resuming?"
    for places in ([taken] * count, [0] * count):
        yield Cause("scheduler-stands-still", "checkpoint", look), places


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _names(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} {'is' if len(names) == 1 else 'are'}"
