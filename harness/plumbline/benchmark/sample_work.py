"""How much work one sample is: tokens and floating-point operations, by the workload and not by what a trainer says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from plumbline.core.cell import Cell
from plumbline.machine.peak_flops import OF_A_CPU, Peak, peak_of
from plumbline.workloads import PERFORMANCE


@dataclass(frozen=True)
class SampleWork:
    """``tokens`` of a sample, 0 without any; its ``flops``, forward and backward; ``peak`` of a device, or why none."""

    tokens: int
    flops: float
    peak: Peak | str


def work_of(cell: Cell, device: str | None) -> SampleWork:
    """Return the work of a sample of the cell's workload; ``device`` is the name of what it is computed on."""
    tokens, flops = _of_workload(cell.workload, cell.accelerator)
    return SampleWork(tokens, flops, peak_of(device, cell.precision) if cell.accelerator == "cuda" else OF_A_CPU)


@cache
def _of_workload(name: str, accelerator: str) -> tuple[int, float]:
    """Count the operations of a forward and a backward pass over two samples, without computing them.

    Matrix products, convolutions and attention count, a multiplication with its addition as two; the causal half of
    attention counts whole. Nothing is counted twice that a trainer computes twice to save memory.
    """
    workload = PERFORMANCE[name].on(accelerator)
    batch = {key: column.to("meta") for key, column in workload.columns(2, torch.Generator()).items()}
    with torch.device("meta"):
        model = workload.build()
        with FlopCounterMode(display=False) as counter:
            torch.autograd.backward(workload.loss(model(batch), batch))
    return workload.size.model.get("length", 0), counter.get_total_flops() / 2
