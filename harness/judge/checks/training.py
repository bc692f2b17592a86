"""The user's own question: are the weights at the end those of a whole training on one device?"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from harness.core.finding import Finding
from harness.core.trace import Tensors
from harness.judge.examination import Examination
from harness.judge.layout import Layout, at_once, shuffled, whole
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
    layouts = _layouts(examination)
    contract = _train(examination.oracle, examination, layouts)
    ways = {tuple(as_one_device(layout) for layout in layouts) for as_one_device in (whole, at_once)}
    one_device = [contract if way == layouts else _train(examination.oracle, examination, way) for way in ways]
    noises = _noises(examination, contract)
    from_contract: Deviation | None = None
    from_one: dict[int, Deviation] = {}
    gaps: dict[int, float] = {}
    for name, value in last.ranks[0].after.items():
        if name not in contract:
            continue  # the subject's own addition to the model: not the job's, so not judged
        noise = noises[name]
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
        limit=0.0 if examination.exact else limit(RUNS),
        promise="a training under the backend's contract gives",
    )


def noise_at_the_end(examination: Examination) -> dict[str, float]:
    """Return what rounding alone explains of a difference between weights at the end, by name."""
    return _noises(examination, _train(examination.oracle, examination, _layouts(examination)))


def _layouts(examination: Examination) -> tuple[Layout, ...]:
    """Return the contract's layout of each step; one device's where that is the same: one pass, not many."""
    layouts = tuple(examination.layouts.values())
    return tuple(map(whole, layouts)) if examination.is_one_device else layouts


def _noises(examination: Examination, contract: Tensors) -> dict[str, float]:
    """Return the noise of the weights of whole trainings, of which ``contract`` is the one in float64."""
    layouts = _layouts(examination)
    rng = random.Random(examination.workload.seed)
    rough = [_train(examination.rough, examination, [shuffled(layout, rng) for layout in layouts]) for _ in range(RUNS)]
    noises = {}
    for name, right in contract.items():
        # At least one rounding of the weights, and in 16 bits one of the way they went: small dyadic numbers may
        # need none in every order that was tried, and one in another.
        travelled = right - examination.start[name].double()
        unit = rounding_unit([right], examination.epsilon) + rounding_unit([travelled], examination.coarsest)
        errors = [distance(run[name], right) for run in rough]
        # A run that overflowed in float16 measures no rounding.
        noises[name] = max([unit, *(error for error in errors if math.isfinite(error))])
    return noises


def _train(oracle: Oracle, examination: Examination, layouts: Sequence[Layout]) -> Tensors:
    oracle.load(examination.start)
    optimizer = oracle.optimizer()
    schedule = oracle.schedule(optimizer)
    for moment, layout in zip(examination.taken, layouts, strict=True):
        oracle.set_scene(moment.ranks)
        for names in moment.ranks[0].turns or (tuple(oracle.parameters),):
            gradient = oracle.gradient(layout, moment.ranks[0].scale or 1.0)
            oracle.set_gradients({name: gradient[name] for name in names if name in gradient})
            optimizer.step()
        schedule()
    return oracle.weights()
