"""The user's own question: are the weights at the end those of a whole training on one device?"""

from __future__ import annotations

from harness.core.finding import Finding
from harness.judge.error_outcome import Deviation, Vacuous, larger, nearest
from harness.judge.oracle.full_training import TRAINING_RUNS
from harness.judge.oracle.layout import at_once, whole
from harness.judge.oracle.noise import distance, in_noise, limit
from harness.judge.trace_analysis import TraceAnalysis


def training(analysis: TraceAnalysis) -> Finding:
    """Train freely in float64 from the job's weights with the samples the subject used, and compare the end."""
    if not analysis.steps_taken:
        raise Vacuous("no optimizer step was seen on every rank")
    last = analysis.steps_taken[-1]
    free = analysis.full_training
    contract = free.contract
    ways = {tuple(as_one_device(layout) for layout in free.layouts) for as_one_device in (whole, at_once)}
    one_device = [contract if way == free.layouts else free.end(way) for way in ways]
    from_contract: Deviation | None = None
    from_one: dict[int, Deviation] = {}
    gaps: dict[int, float] = {}
    for name, value in last.ranks[0].after.items():
        if name not in contract:
            continue  # the subject's own addition to the model: not the job's, so not judged
        noise = free.noise[name]
        if noise == 0:
            continue
        place = (last.index, name)
        from_contract = larger(from_contract, Deviation(in_noise(distance(value, contract[name]), noise), *place))
        for way, weights in enumerate(one_device):
            error = in_noise(distance(value, weights[name]), noise)
            from_one[way] = larger(from_one.get(way), Deviation(error, *place))
            gaps[way] = max(gaps.get(way, 0.0), in_noise(distance(weights[name], contract[name]), noise))
    if from_contract is None:
        raise Vacuous("every weight is zero at the end")
    return nearest(
        "training",
        "weights at the end",
        whole=min(from_one.values(), key=lambda deviation: deviation.x_noise),
        contract=from_contract,
        gap=min(gaps.values()),
        limit=0.0 if analysis.exact else limit(TRAINING_RUNS),
        promise="a training under the backend's contract gives",
    )
