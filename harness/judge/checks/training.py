"""The user's own question: are the final weights those of a whole training on one device?"""

from __future__ import annotations

from harness.core.finding import Finding
from harness.judge.findings import Vacuous, compare_with_two
from harness.judge.oracle.layout import one_device_layout, single_batch_layout
from harness.judge.oracle.noise import Deviation, distance, in_noise, larger
from harness.judge.trace_analysis import TraceAnalysis


def training(analysis: TraceAnalysis) -> Finding:
    """Train in float64 from the job's weights with the samples that the subject used, and compare the final weights."""
    if not analysis.steps_taken:
        raise Vacuous("no optimizer step was seen on every rank")
    last = analysis.steps_taken[-1]
    full_training = analysis.full_training
    contract = full_training.contract
    ways = {tuple(map(way, full_training.layouts)) for way in (one_device_layout, single_batch_layout)}
    one_device = [contract if way == full_training.layouts else full_training.end(way) for way in ways]
    from_contract: Deviation | None = None
    from_one_device: dict[int, Deviation] = {}
    gaps: dict[int, float] = {}
    for name, value in last.ranks[0].after.items():
        if name not in contract:
            continue  # the subject's own addition to the model: not the job's, so not judged
        noise = full_training.noise[name]
        if noise == 0:
            continue
        place = (last.index, name)
        from_contract = larger(from_contract, Deviation(in_noise(distance(value, contract[name]), noise), *place))
        for way, weights in enumerate(one_device):
            error = Deviation(in_noise(distance(value, weights[name]), noise), *place)
            from_one_device[way] = larger(from_one_device.get(way), error)
            gaps[way] = max(gaps.get(way, 0.0), in_noise(distance(weights[name], contract[name]), noise))
    if from_contract is None:
        raise Vacuous("every weight is zero at the end")
    return compare_with_two(
        "training",
        "weights at the end",
        one_device=min(from_one_device.values(), key=lambda deviation: deviation.x_noise),
        contract=from_contract,
        gap=min(gaps.values()),
        limit=analysis.allowed(full_training.limit),
        promise="those of a training under the backend's contract",
    )
