"""The measurement records of cells, from their launches, with scaling efficiency and a digest of the workload."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence

from plumbline.benchmark.launch_metrics import METRICS, Key, samples_of, step_quantiles, timeline, work_of
from plumbline.benchmark.timed_launch import LaunchSample
from plumbline.core.cell import Cell
from plumbline.results.records import Measurement
from plumbline.statistics.intervals import figure_interval, why_unstable
from plumbline.workloads import PERFORMANCE, Columns, Workload


def measurements(
    cell: Cell, launches: Sequence[LaunchSample], reproduce: str, device: str | None = None
) -> list[Measurement]:
    """Return every figure of ``cell`` on a ``device`` of that name, or raise ``SamplesError``.

    A figure that is too uncertain has a refusal instead of a value.
    """
    replicas = cell.parallelism.replicas(cell.topology)
    work = work_of(cell, device)
    found = samples_of(launches, cell.topology.devices, work, replicas)
    same = {"workload_key": workload_key(cell), "reproduce": reproduce}
    further: dict[str, dict[str, object]] = {
        "step_p50": {"quantiles": step_quantiles(launches)},
        "pipeline_bubble": {
            "timeline": timeline(launches[-1].timed, replicas),
            "formula": "1 - computing / (ranks × time), from the start of a step's first forward or backward "
            "to the end of its last",
        },
    }
    if not isinstance(work.peak, str):
        over = f"{work.peak.flops:.5g} FLOP/s ({work.peak.source})"
        further["mfu"] = {"formula": f"{work.flops:.5g} FLOP per sample × samples per second and device / {over}"}
        further["hfu"] = {"formula": f"FLOP executed per second and device / {over}"}
    return [_measurement(cell, key, samples, same | further.get(key[0], {})) for key, samples in found.items()]


def not_applicable(cell: Cell, launches: Sequence[LaunchSample], device: str | None = None) -> dict[str, str]:
    """Return, by name, the metrics that do not apply to ``cell`` or cannot be measured here, and why."""
    found: dict[str, str] = {}
    peak, looked = work_of(cell, device).peak, [rank for launch in launches for rank in launch.timed.ranks]
    if isinstance(peak, str):
        found |= {"mfu": peak, "hfu": peak}
    elif cell.processes < cell.topology.devices or any(rank.flops is None for rank in looked):
        found["hfu"] = "FLOPs are not counted if one process uses several devices"
    energy = next((launch.timed.energy for launch in launches if isinstance(launch.timed.energy, str)), None)
    if energy is not None:
        found |= {"energy_per_step": energy, "energy_per_sample": energy}
    return found


def _measurement(cell: Cell, key: Key, samples: Sequence[float], further: Mapping[str, object]) -> Measurement:
    name, rank = key
    metric = METRICS[name]
    figures: dict[str, object] = {"samples": samples, "rank": rank, **further}
    if metric.unit == "count":
        # Such as out-of-memory events: one in any launch must not disappear in a median.
        return Measurement.of(cell, name, metric.unit, metric.better, value=max(samples), **figures)
    interval = figure_interval(samples, share=metric.unit == "share")
    value = None if interval.refusal else interval.value
    bounds = {"value": value, "low": interval.low, "high": interval.high, "refusal": interval.refusal}
    return Measurement.of(cell, name, metric.unit, metric.better, **bounds, **figures)


def workload_key(cell: Cell) -> str:
    """Return a digest of code, sizes and steps; comments, docstrings and the seed do not count."""
    workload = PERFORMANCE[cell.workload].on(cell.accelerator)
    devices = cell.topology.devices
    code = [_code(kind) for kind in (*type(workload).__mro__, Columns) if issubclass(kind, (Workload, Columns))]
    size, extent = workload.size, workload.extent(devices)
    definition = [code, vars(size), vars(extent), workload.global_batch_size(devices), workload.rounds]
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]


def _code(kind: type) -> str:
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def scaling(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the scaling efficiency of each throughput on several devices that was also measured on a single one.

    It is the throughput divided by the number of devices times the throughput of one device. With a constant batch on
    each device (weak scaling) it shows the cost of communication; with a constant global batch (strong scaling), also
    the cost of smaller batches. ``samples`` are divided launch by launch; the bounds combine the bounds of both
    figures, assumed to be independent.
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
    (middle, half), (of_one, half_of_one) = _middle_and_half(several), _middle_and_half(single)
    middle, half = middle - of_one - math.log(devices), math.hypot(half, half_of_one)
    low, high = math.exp(middle - half), math.exp(middle + half)
    wide = why_unstable(low, high)
    assert several.value is not None
    assert single.value is not None
    value = None if wide else several.value / single.value / devices
    samples = tuple(a / b / devices for a, b in zip(several.samples, single.samples, strict=False))
    changed = {"metric": metric, "unit": METRICS[metric].unit, "value": value, "samples": samples}
    return several.model_copy(update={**changed, "low": low, "high": high, "refusal": wide})


def _middle_and_half(one: Measurement) -> tuple[float, float]:
    assert one.low is not None
    assert one.high is not None
    middle = (math.log(one.low) + math.log(one.high)) / 2
    return middle, math.log(one.high) - middle
