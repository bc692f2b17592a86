"""Parses the return value of ``configure_optimizers``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from plumbline.trainer.errors import MisconfigurationError


@dataclass(frozen=True)
class SchedulerConfig:
    """A scheduler, the interval at which it steps, and the metric, if any, that its ``step`` gets."""

    scheduler: Any
    interval: str = "epoch"
    monitor: str | None = None

    def step(self, metrics: dict[str, float]) -> None:
        if self.monitor is None:
            self.scheduler.step()
        elif self.monitor in metrics:
            self.scheduler.step(metrics[self.monitor])
        else:
            raise MisconfigurationError(
                f"A scheduler monitors {self.monitor!r}, but the metrics are {sorted(metrics)}: name one of them."
            )


@contextmanager
def frozen(weights: Sequence[Tensor]) -> Iterator[None]:
    trained = [weight for weight in weights if weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parse_optimizers(returned: Any, module: nn.Module) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    optimizers, schedulers = returned, []
    if isinstance(returned, (list, tuple)) and any(isinstance(part, (list, tuple)) for part in returned):
        optimizers, schedulers = returned if len(returned) == 2 else (None, [])
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise MisconfigurationError(
            f"configure_optimizers returned {type(returned).__name__} {returned!r}: return an optimizer, a "
            "list of optimizers, or a list of optimizers and a list of schedulers."
        )
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(p) not in own for optimizer in optimizers for p in parameters_of(optimizer)):
        raise MisconfigurationError(
            "An optimizer has parameters that are not the module's: create it in configure_optimizers, from "
            "self.parameters()."
        )
    return optimizers, [_schedule(entry) for entry in schedulers]


def _schedule(entry: Any) -> SchedulerConfig:
    options = dict(entry) if isinstance(entry, dict) else {"scheduler": entry}
    if "scheduler" not in options or options.keys() - {"scheduler", "interval", "monitor"}:
        raise MisconfigurationError(
            f"The scheduler entry has the keys {sorted(options)}: it takes 'scheduler', 'interval' and 'monitor'."
        )
    schedule = SchedulerConfig(**options)
    if schedule.interval not in ("epoch", "step"):
        raise MisconfigurationError(f"A scheduler's interval is 'epoch' or 'step', not {schedule.interval!r}.")
    if isinstance(schedule.scheduler, ReduceLROnPlateau) and schedule.monitor is None:
        raise MisconfigurationError("ReduceLROnPlateau needs a metric: return {'scheduler': s, 'monitor': 'val_loss'}.")
    return schedule
