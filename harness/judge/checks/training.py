"""The user's own question: are the weights at the end those of a whole training on one device?"""

from __future__ import annotations

import math
import random

from harness.core.finding import Finding
from harness.core.trace import Tensors
from harness.judge.examination import Examination
from harness.judge.layout import Layout, shuffled, whole
from harness.judge.noise import distance, in_noise, limit, rounding_unit
from harness.judge.oracle import Oracle
from harness.judge.verdict import Deviation, Vacuous, larger, nearest

RUNS = 4
"""Whole trainings in the cell's precision that measure the noise; each costs as much as the cell itself."""


def training(examination: Examination) -> Finding:
    """Train freely in float64 from the job's weights with the samples the subject used, and compare the end."""
    if not examination.taken:
        raise Vacuous("no optimizer step was seen on every rank")
    last = examination.taken[-1]
    contract_layouts = list(examination.layouts.values())
    whole_layouts = [whole(layout) for layout in contract_layouts]
    contract = _train(examination.oracle, examination, contract_layouts)
    one_device = contract if whole_layouts == contract_layouts else _train(
        examination.oracle, examination, whole_layouts
    )  # fmt: skip
    rng = random.Random(examination.workload.seed)
    rough = [
        _train(examination.rough, examination, [shuffled(layout, rng) for layout in contract_layouts])
        for _ in range(RUNS)
    ]
    from_whole: Deviation | None = None
    from_contract: Deviation | None = None
    gap = 0.0
    for name, value in last.ranks[0].after.items():
        unit = rounding_unit([contract[name]], examination.epsilon)
        errors = [distance(run[name], contract[name]) for run in rough]
        # A run that overflowed in float16 measures no rounding.
        noise = max([unit, *(error for error in errors if math.isfinite(error))])
        if noise == 0:
            continue
        place = (last.index, name)
        from_whole = larger(from_whole, Deviation(in_noise(distance(value, one_device[name]), noise), *place))
        from_contract = larger(from_contract, Deviation(in_noise(distance(value, contract[name]), noise), *place))
        gap = max(gap, in_noise(distance(one_device[name], contract[name]), noise))
    if from_whole is None or from_contract is None:
        raise Vacuous("every weight is zero at the end")
    return nearest(
        "training", "weights at the end", whole=from_whole, contract=from_contract, gap=gap,
        limit=0.0 if examination.exact else limit(RUNS), promise="a training under the backend's contract gives",
    )  # fmt: skip


def _train(oracle: Oracle, examination: Examination, layouts: list[Layout]) -> Tensors:
    oracle.load(examination.start)
    optimizer = oracle.optimizer()
    for moment, layout in zip(examination.taken, layouts, strict=True):
        oracle.set_gradients(oracle.gradient(layout, moment.ranks[0].scale or 1.0))
        optimizer.step()
    return oracle.weights()
