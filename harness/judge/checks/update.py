"""Did the optimizer do with the gradient what the workload's optimizer does?"""

from __future__ import annotations

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.trace import RankTrace
from harness.judge.causes import explain_update
from harness.judge.causes.update import set_learning_rates
from harness.judge.examination import DRAWS, Examination, same
from harness.judge.noise import distance, in_noise, limit, rounding_unit
from harness.judge.oracle import Oracle
from harness.judge.verdict import Deviation, Vacuous, larger, single


def update(examination: Examination) -> Finding:
    """Replay the subject's own gradients through the workload's optimizer and compare the weights after each step.

    The optimizer's state is the replay's own, fed with the subject's gradients, so that a lost state shows.
    Noise is what the same replay in the cell's storage precision differs by, at least one rounding.
    """
    if not examination.taken:
        raise Vacuous("no optimizer step was seen on every rank")
    if not any(
        not torch.equal(step.before[name], step.after[name])
        for moment in examination.taken
        for step in moment.ranks
        for name in step.after
    ):
        raise Vacuous("no weight moved at any step")
    worst: Deviation | None = None
    judged: list[RankTrace] = []
    for trace in examination.trace.ranks:
        if any(_same_history(trace, other) for other in judged):
            continue
        judged.append(trace)
        worst = larger(worst, _replay(trace, examination))
    assert worst is not None
    finding = single(
        "update",
        "weights after the step",
        "what the optimizer makes of the gradients",
        worst,
        0.0 if examination.exact else limit(DRAWS),
    )
    return explain_update(finding, examination) if finding.outcome is Outcome.FAILED else finding


def _replay(trace: RankTrace, examination: Examination) -> Deviation:
    exact = Oracle(examination.workload, examination.devices)
    rough = Oracle(examination.workload, examination.devices, examination.cell.arithmetic)
    replays = [(oracle, oracle.optimizer()) for oracle in (exact, rough)]
    worst = Deviation(0.0)
    for index, step in enumerate(trace.steps):
        if step.skipped:
            continue
        for oracle, optimizer in replays:
            oracle.load(step.before)
            oracle.set_gradients(step.gradients)
            # The subject's own rate: whether that is right is a question of its own.
            set_learning_rates(optimizer, step.learning_rates)
            optimizer.step()
        right, rounded = exact.weights(), rough.weights()
        for name, value in step.after.items():
            if name not in right:
                continue  # the subject's own addition to the model: not the job's, so not judged
            parts = [step.before[name].double(), right[name] - step.before[name].double()]
            unit = rounding_unit(parts, examination.epsilon)
            noise = max(unit, distance(rounded[name], right[name]))
            error = distance(value, right[name])
            worst = larger(worst, Deviation(in_noise(error, noise), index, name, trace.rank))
    return worst


def _same_history(left: RankTrace, right: RankTrace) -> bool:
    return len(left.steps) == len(right.steps) and all(
        same(a.before, b.before) and same(a.gradients, b.gradients) and same(a.after, b.after)
        for a, b in zip(left.steps, right.steps, strict=True)
    )
