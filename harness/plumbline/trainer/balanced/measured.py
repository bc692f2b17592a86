"""Measures what stages take: seconds of computing and of whole batches, and memory, beside the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from plumbline.trainer.balanced.clock import computing_clock, median_seconds, wall_clock
from plumbline.trainer.balanced.stage_plan import StagePlan
from plumbline.trainer.balanced.stages import BlockCost, Prediction, Shared, Stage

KEPT = 256
"""Of how many micro-batches, the last ones, times are kept."""


class StageClock:
    """Measures the computation of this stage without waiting, and whole batches with it."""

    def __init__(self, device: torch.device) -> None:
        computing = computing_clock(device)
        self.clocks = {
            "forward": computing,
            "backward": computing,
            "batch": wall_clock(device),
            "evaluation": computing,
        }
        self.spans: dict[str, deque[tuple[Any, Any]]] = {kind: deque(maxlen=KEPT) for kind in self.clocks}
        self.disturbed = False
        """Whether what was measured so far took longer than usual: it counts only if nothing follows."""

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure a piece of work, unless it raises."""
        if self.disturbed:
            self.disturbed = False
            for spans in self.spans.values():
                spans.clear()
        clock = self.clocks[kind]
        start = clock()
        yield
        self.spans[kind].append((start, clock()))

    def seconds(self, kind: str) -> float:
        """Return the median of the latest measurements, 0 if there are none."""
        return median_seconds(self.spans[kind])

    def report(self) -> tuple[float, float]:
        """Return the seconds of a micro-batch and of a batch."""
        return self.seconds("forward") + self.seconds("backward"), self.seconds("batch")


@dataclass(frozen=True)
class Balance:
    """The plan of a training and its measurements; as text it is a table of the stages."""

    plan: StagePlan
    measured: Prediction | None = None

    def __str__(self) -> str:
        return self.plan.table(self.measured)

    def with_measured(self, reports: Sequence[tuple[float, float, int]]) -> Balance:
        """Return the plan with what all ranks measured: seconds, as from ``StageClock.report``, and peak bytes."""
        stages = len(self.plan.stages)
        of_stages = [reports[stage::stages] for stage in range(stages)]  # of each its replicas
        busy = tuple(fmean(seconds for seconds, _, _ in replicas) for replicas in of_stages)
        step = max(seconds for _, seconds, _ in reports)
        if not step:
            return self
        peaks = tuple(max(peak for _, _, peak in replicas) for replicas in of_stages)
        bubble = 1 - self.plan.micro_batches // self.plan.replicas * sum(busy) / (stages * step)
        return Balance(self.plan, Prediction(step, busy, peaks, max(0.0, bubble)))

    def as_dict(self) -> dict[str, Any]:
        """Return nested dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Balance:
        plan, measured = values["plan"], values["measured"]
        parts = {"blocks": BlockCost, "stages": Stage, "ties": Shared}
        nested = {name: tuple(kind(**value) for value in plan[name]) for name, kind in parts.items()}
        whole = StagePlan(**{**plan, **nested, "predicted": Prediction(**plan["predicted"])})
        return cls(whole, None if measured is None else Prediction(**measured))
