"""Scaling efficiency: throughput on several devices over that on one device times their number.

With a constant batch on each device (weak scaling) it shows the cost of communication; with a constant global batch
(strong scaling), also that of smaller batches on each device. 1 is perfect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plumbline.benchmark.launch_metrics import METRICS
from plumbline.results.records import Measurement
from plumbline.statistics.intervals import why_unstable
from plumbline.workloads import PERFORMANCE


def scaling(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the scaling efficiency of each throughput on several devices that was also measured on a single one.

    ``samples`` are divided launch by launch; the bounds combine those of both figures, taken as independent.
    """
    figures = [one for one in measurements if one.metric == "throughput" and one.value is not None]
    single = {_kind(one): one for one in figures if one.num_nodes * one.gpus == 1}
    several = [one for one in figures if one.num_nodes * one.gpus > 1 and _kind(one) in single]
    return [_efficiency(one, single[_kind(one)]) for one in several]


def _kind(one: Measurement) -> tuple[str, str, str, str]:
    return one.subject, one.workload, one.precision, one.accelerator


def _efficiency(several: Measurement, single: Measurement) -> Measurement:
    devices = several.num_nodes * several.gpus
    metric = "scaling_strong" if PERFORMANCE[several.workload].strong else "scaling_weak"
    middle = _middle(several) - _middle(single) - math.log(devices)
    half = math.hypot(_half(several), _half(single))
    low, high = math.exp(middle - half), math.exp(middle + half)
    wide = why_unstable(low, high)
    assert several.value is not None
    assert single.value is not None
    return several.model_copy(
        update={
            "metric": metric,
            "unit": METRICS[metric].unit,
            "value": None if wide else several.value / single.value / devices,
            "low": low,
            "high": high,
            "samples": tuple(a / b / devices for a, b in zip(several.samples, single.samples, strict=False)),
            "refusal": wide,
        }
    )


def _middle(one: Measurement) -> float:
    assert one.low is not None
    assert one.high is not None
    return (math.log(one.low) + math.log(one.high)) / 2


def _half(one: Measurement) -> float:
    assert one.high is not None
    return math.log(one.high) - _middle(one)
