"""What stages really took: seconds of computing on each, of whole batches, and memory, beside the plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from harness.trainer.balanced.stages import BlockCost, Plan, Prediction, Shared, Stage

KEPT = 256
"""Of how many micro-batches, the last ones, times are kept."""


class StageClock:
    """Measures what this stage computes, without what it waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: dict[str, deque[tuple[Any, Any]]] = {
            kind: deque(maxlen=KEPT) for kind in ("forward", "backward", "batch", "evaluation")
        }

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure a piece of work; one that raises is not kept."""
        start = self._now()
        yield
        self.spans[kind].append((start, self._now()))

    def seconds(self, kind: str) -> float:
        """Return the median of the last ones of this kind, 0 where there was none."""
        spans = self.spans[kind]
        if not spans:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return float(median(start.elapsed_time(end) / 1000 for start, end in spans))
        return float(median(end - start for start, end in spans))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def report(self) -> tuple[float, float, int | None]:
        """Return seconds of a micro-batch, seconds of a batch, and the peak memory, None where nothing counts it."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return self.seconds("forward") + self.seconds("backward"), self.seconds("batch"), peak


@dataclass(frozen=True)
class Balance:
    """What was planned for a training, and what was measured in it; as text it is a table of the stages.

    ``measured`` has no peak memory for simulated devices.
    """

    plan: Plan
    measured: Prediction | None = None

    def __str__(self) -> str:
        return self.plan.table(self.measured)

    def with_measured(self, reports: Sequence[tuple[float, float, int | None]]) -> Balance:
        """Return the same plan with what the clocks of all stages report."""
        busy = tuple(seconds for seconds, _, _ in reports)
        step = max(seconds for _, seconds, _ in reports)
        if not step:
            return self
        peaks = tuple(peak for _, _, peak in reports if peak is not None)
        bubble = 1 - self.plan.micro_batches * sum(busy) / (len(busy) * step)
        return Balance(self.plan, Prediction(step, busy, peaks, max(0.0, bubble)))

    def as_dict(self) -> dict[str, Any]:
        """Return nested dicts, lists and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Balance:
        """Return what ``as_dict`` was called on."""
        plan, measured = values["plan"], values["measured"]
        parts = {"blocks": BlockCost, "stages": Stage, "ties": Shared}
        nested = {name: tuple(kind(**value) for value in plan[name]) for name, kind in parts.items()}
        whole = Plan(**{**plan, **nested, "predicted": Prediction(**plan["predicted"])})
        return cls(whole, None if measured is None else Prediction(**measured))
