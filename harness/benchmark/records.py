"""From the launches of one cell to the records of the run."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections.abc import Sequence

from harness.benchmark.figures import METRICS, Key, Launch, samples_of, step_quantiles
from harness.core.cell import Cell
from harness.results.records import Measurement
from harness.statistics.launch_estimate import estimate
from harness.workloads import PERFORMANCE, Columns, Workload


def measurements(cell: Cell, launches: Sequence[Launch], reproduce: str) -> list[Measurement]:
    """Return every figure of ``cell``; one that is worth nothing has no value, but says so.

    Raises:
        SamplesError: samples cannot be counted.
    """
    found = samples_of(launches, cell.topology.devices)
    same = {"workload_key": workload_key(cell), "reproduce": reproduce}
    return [
        _measurement(cell, key, samples, step_quantiles(launches) if key[0] == "step_p50" else (), same)
        for key, samples in found.items()
    ]


def _measurement(
    cell: Cell, key: Key, samples: Sequence[float], quantiles: Sequence[float], same: dict[str, str]
) -> Measurement:
    name, rank = key
    metric = METRICS[name]
    figures: dict[str, object] = {"samples": samples, "quantiles": quantiles, "rank": rank, **same}
    if metric.unit == "count":
        # Once is enough: what a median of counts would hide is what is asked for.
        return Measurement.of(cell, name, metric.unit, metric.better, value=max(samples), **figures)
    told = estimate(samples, share=metric.unit == "share")
    value = None if told.refusal else told.value
    bounds = {"value": value, "low": told.low, "high": told.high, "refusal": told.refusal}
    return Measurement.of(cell, name, metric.unit, metric.better, **bounds, **figures)


def workload_key(cell: Cell) -> str:
    """Return a digest of what the cell trains and how long: other code, sizes or steps make another key.

    Comments and docstrings do not, nor does the seed.
    """
    workload = PERFORMANCE[cell.workload].on(cell.accelerator)
    devices = cell.topology.devices
    code = [_code(kind) for kind in (*type(workload).__mro__, Columns) if issubclass(kind, (Workload, Columns))]
    size, extent = workload.size, workload.extent(devices)
    definition = [code, vars(size), vars(extent), workload.global_batch_size(devices), workload.rounds]
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:16]


def _code(kind: type) -> str:
    """Return the module in which a class is defined, without its comments and docstrings."""
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
