"""Notes the learning rates and other settings of each optimizer step, and when learning-rate schedulers step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.recording.observer import WrappingObserver
from plumbline.recording.patching import attempt, wrap_overrides

_SETTINGS = (
    "alpha", "amsgrad", "beta1", "beta2", "betas", "centered", "dampening", "decoupled_weight_decay", "eps", "etas",
    "lambd", "lr_decay", "maximize", "momentum", "momentum_decay", "nesterov", "ns_steps", "rho", "weight_decay",
)  # fmt: skip
"""Arguments of optimizers that enter the update. Other arguments, such as a rank, may differ between ranks."""


class LearningRate(WrappingObserver):
    """Wraps the ``step`` of every scheduler.

    Facts of a step: ``rates`` of the parameter groups that have one; ``settings``: the other numbers in each group
    that enter the update, by name; ``schedulers``: how many the optimizer has;
    ``lengths``: the numbers of steps for which they are made, where they have one;
    ``schedule``: for each scheduler step since the optimizer's last step, the number of the latest backward pass at
    that time, and whether the optimizer had not stepped since that pass began;
    ``usual``: in a later window, how many scheduler steps there were between any two steps of the first window. None if
    not always equally many, or if there are other optimizers, between whose steps a window may begin;
    ``left``: in a later window, the rates that a scheduler has set, if the optimizer has others, although it had those
    of a scheduler at all steps of the first window.
    """

    name = "learning-rate"

    def __init__(self) -> None:
        super().__init__()
        self._schedulers: WeakKeyDictionary[Optimizer, WeakSet[Any]] = WeakKeyDictionary()
        self._calls: WeakKeyDictionary[Optimizer, list[tuple[int, bool]]] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._pass = -1
        self._depth = 0
        self._windows = 0
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._usual: WeakKeyDictionary[Optimizer, list[tuple[int, bool]]] = WeakKeyDictionary()

    def install(self) -> None:
        wrap_overrides(LRScheduler, "step", self._around_step)
        wrap_overrides(LRScheduler, "__init__", self._around_init)

    def found(self, one: Any) -> None:
        optimizer = getattr(one, "optimizer", None)
        if isinstance(one, LRScheduler) and isinstance(optimizer, Optimizer):
            self._schedulers.setdefault(optimizer, WeakSet()).add(one)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)

    def start(self) -> None:
        super().start()
        self._windows += 1
        self._calls.clear()
        self._stepped.clear()

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Note the pass. No optimizer has stepped since it began."""
        self._pass = number
        self._stepped.clear()

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        self._stepped.add(optimizer)
        rates = [float(rate) for group in optimizer.param_groups if (rate := group.get("lr")) is not None]
        schedule = self._calls.pop(optimizer, [])
        last = [one for one in self._scheduled(optimizer) if len(one) == len(rates)]
        is_own, usual = not last or any(_are_near(rates, one) for one in last), self._usual.setdefault(optimizer, [])
        if self._windows == 1:
            usual.append((len(schedule), is_own))
        counts = {count for count, _ in usual[1:]}  # before the first step, a scheduler may have been stepped or not
        later = self._windows > 1 and len(counts) > 0
        return {
            "usual": next(iter(counts)) if later and len(counts) == len(self._optimizers) == 1 else None,
            "left": last[0] if later and not is_own and all(own for _, own in usual) else None,
            "rates": rates,
            "settings": [_settings(group) for group in optimizer.param_groups],
            "schedulers": len(self._schedulers.get(optimizer, ())),
            "lengths": [length for one in self._schedulers.get(optimizer, ()) if (length := _length(one)) is not None],
            "schedule": [list(call) for call in schedule],
        }

    def _scheduled(self, optimizer: Optimizer) -> list[list[float]]:
        """Return the rates that each scheduler of an optimizer wants now, or has set last.

        Many schedulers multiply the last rate, so that a rate that the script has set lasts. Some know their course.
        """
        schedulers = self._schedulers.get(optimizer, ())
        every = (
            attempt(getattr(one, "_get_closed_form_lr", list)) or getattr(one, "_last_lr", ()) for one in schedulers
        )
        return [[float(rate) for rate in one] for one in every if one]

    def _around_init(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        # A scheduler's constructor takes a first step, which sets the first rate. It does not count.
        self._depth += 1
        try:
            original(scheduler, *args, **kwargs)
        finally:
            self._depth -= 1
        with self.notes():
            self.found(scheduler)

    def _around_step(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = self._depth == 0
        self._depth += 1
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            self._depth -= 1
            if outermost and self.attends:
                with self.notes():
                    optimizer = getattr(scheduler, "optimizer", None)
                    if isinstance(optimizer, Optimizer):
                        self._calls.setdefault(optimizer, []).append((self._pass, optimizer not in self._stepped))


def _are_near(rates: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether rates differ only by the rounding of a schedule that multiplies the last rate again and again."""
    most = 1e-6 * max(map(abs, (*rates, *others)), default=0.0)
    return all(abs(one - other) <= most for one, other in zip(rates, others, strict=True))


def _length(scheduler: Any) -> int | None:
    """Return the number of steps after which a schedule has ended, None if it has no end or does not tell."""
    found = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    # The functions of Transformers' schedules are partials, whose largest number is that of all steps.
    arguments = [one.keywords.values() for one in getattr(scheduler, "lr_lambdas", ()) if isinstance(one, partial)]
    numbers = [one for each in (found, *arguments) for one in each if type(one) is int]
    return max(numbers, default=None)


def _settings(group: dict[str, Any]) -> Facts:
    found: Facts = {}
    for name in _SETTINGS:
        value = group.get(name)
        numbers: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
        if all(isinstance(one, (bool, int, float)) for one in numbers):
            found[name] = [float(one) for one in numbers]
    return found
