"""Are the model's buffers, such as BatchNorm's running statistics, shared and updated as they should be?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch

from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.core.trace import Step, Tensors
from harness.judge.examination import DRAWS, Examination, Moment, same
from harness.judge.layout import Share
from harness.judge.noise import distance, in_noise, limit, rounding_unit
from harness.judge.oracle import Oracle
from harness.judge.verdict import Deviation, Vacuous, larger, times


def buffers(examination: Examination) -> Finding | None:
    """All ranks begin each step's forward with the same buffers, and these are what the first device made of them.

    They may differ after a forward: DDP broadcasts them at the next one. None where the model has no buffers.
    """
    if not examination.moments or not examination.moments[0].ranks[0].buffers:
        return None
    for moment in examination.moments:
        for rank, step in enumerate(moment.ranks):
            if not same(step.buffers, moment.ranks[0].buffers):
                name = next((n for n, b in step.buffers.items() if not _equal(b, moment.ranks[0].buffers.get(n))), None)
                return Finding(
                    "buffers",
                    Outcome.FAILED,
                    f"at step {moment.index} rank {rank} began with another {name} than rank 0: "
                    "buffers are not broadcast before the forward",
                    cause="buffers-not-broadcast",
                    family="buffers",
                    step=moment.index,
                    parameter=name,
                    rank=rank,
                )
    worst = _replay(examination)
    good = worst.x_noise <= limit(DRAWS)
    return Finding(
        "buffers",
        Outcome.PASSED if good else Outcome.FAILED,
        f"buffers are {'those' if good else 'not those'} of the first device ({times(worst.x_noise)}, {worst.where})",
        cause=None if good else "buffers-updated-otherwise",
        family=None if good else "buffers",
        error_x_noise=worst.x_noise,
        step=worst.step,
        parameter=worst.parameter,
    )


def _replay(examination: Examination) -> Deviation:
    """Follow forwards from each step's buffers to the next step's, and return the largest error.

    The forwards are those of the first device, or of one device that takes everybody's samples: a BatchNorm that
    shares its statistics remembers those. A trainer keeps to one of the two.
    """
    worst: dict[str, Deviation] = {}
    moved = False
    for moment, following in zip(examination.moments, examination.moments[1:], strict=False):
        first, then = moment.ranks[0], following.ranks[0].buffers
        moved = moved or any(not _equal(value, first.buffers.get(name)) for name, value in then.items())
        for way, shares in _ways(moment):
            right, rounded = (_after(oracle, first, shares) for oracle in (examination.oracle, examination.rough))
            for name, value in then.items():
                unit = rounding_unit([right[name].double()], examination.epsilon)
                noise = max(unit, distance(rounded[name], right[name]))
                error = in_noise(distance(value, right[name]), noise)
                worst[way] = larger(worst.get(way), Deviation(error, following.index, name))
    if len(examination.moments) > 1 and not moved and any(_is_running(name) for name in examination.oracle.buffers):
        raise Vacuous("no buffer changed from step to step")
    return min(worst.values(), key=lambda deviation: deviation.x_noise, default=Deviation(0.0))


def _ways(moment: Moment) -> Iterator[tuple[str, list[Share]]]:
    """Yield the samples of each forward: of the first device, and of one device that has all."""
    ranks = [step.micro_batches for step in moment.ranks]
    yield "first device", [micro.forwards[0] for micro in ranks[0] if micro.forwards]
    yield (
        "one device",
        [tuple(i for micro in micros if micro for i in micro.samples) for micros in zip_longest(*ranks)],
    )


def _after(oracle: Oracle, step: Step, shares: list[Share]) -> Tensors:
    oracle.load(step.before)
    return oracle.buffers_after(step.buffers, shares)


def _is_running(name: str) -> bool:
    return name.rpartition(".")[2].startswith(("running_", "num_batches_"))


def _equal(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    return right is not None and torch.equal(left, right)
