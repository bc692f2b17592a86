"""The workload's optimizer, fed with what the subject's was handed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.core.cell import Cell
from harness.evidence.trace import Step, Tensors
from harness.judge.oracle.oracle import Optimizers, Oracle
from harness.judge.update_replay import weights_after
from harness.workloads import Problem

OPTIONS: tuple[dict[str, Any], ...] = (
    *({"weight_decay": value} for value in (0.0, 0.01, 0.1, 1e-3, 1e-4, 5e-4)),
    *({"betas": (0.9, value)} for value in (0.95, 0.98, 0.99, 0.999)),
    *({"eps": value} for value in (1e-8, 1e-6, 1e-5)),
    *({"momentum": value} for value in (0.0, 0.9, 0.99)),
)
"""What optimizers are told by mistake, or by the default of somebody's trainer."""


OTHERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    partial(torch.optim.SGD, momentum=0.9),
)
"""What is taken in the place of the workload's optimizer; plain SGD is a mixture of what is there."""

State = dict[str, Any]
"""What an optimizer remembers of one parameter."""


def _forget_count(state: State) -> None:
    if "step" in state:
        state["step"] = state["step"] * 0


def _change_moments(change: Callable[[Tensor], Tensor], state: State) -> None:
    for name, value in state.items():
        if name != "step" and isinstance(value, Tensor):
            state[name] = change(value)


MISHAPS: tuple[Callable[[State], None], ...] = (
    _forget_count,
    partial(_change_moments, torch.zeros_like),
    partial(_change_moments, lambda value: value.half().to(value.dtype)),
    partial(_change_moments, lambda value: value.bfloat16().to(value.dtype)),
)
"""What happens to a state on its way through a checkpoint."""


class Replay:
    """One rank's optimizer from the first step on, in float64 and in the cell's own storage precision.

    ``history`` are the steps of the launch that this one goes on from.
    """

    def __init__(self, workload: Problem, cell: Cell, history: Sequence[Step] = ()) -> None:
        self._workload, self._devices = workload, cell.topology.devices
        self._history = history
        exact, rough = self._new(), Oracle(workload, cell.topology.devices, cell.arithmetic)
        self._exact, self._rough = ((oracle, oracle.optimizer()) for oracle in (exact, rough))
        for step in history:
            if not step.skipped:
                self.step(step.before, step.gradients, step.learning_rates)

    def _new(self) -> Oracle:
        return Oracle(self._workload, self._devices)

    def attempt(self, before: Tensors, gradients: Tensors, rates: tuple[float, ...]) -> Tensors:
        """Return the weights that the step would make, in float64, as if it had not been taken."""
        oracle, optimizers = self._exact
        states = [copy.deepcopy(list(optimizer.state.values())) for optimizer in optimizers.every]
        weights = weights_after(oracle, optimizers, before, gradients, rates)
        for optimizer, state in zip(optimizers.every, states, strict=True):
            keys = list(optimizer.state)
            optimizer.state.clear()
            optimizer.state.update(zip(keys, state, strict=False))
        return weights

    def step(self, before: Tensors, gradients: Tensors, rates: tuple[float, ...]) -> Tensors:
        """Return the weights that the step makes in the cell's storage precision."""
        weights_after(*self._exact, before, gradients, rates)
        return weights_after(*self._rough, before, gradients, rates)

    def variants(self, steps: Sequence[Step]) -> Iterator[Tensors]:
        """Yield the weights after the last of ``steps`` for other optimizers, other options, or another history."""
        history = self._history
        groups = self._exact[1].param_groups
        for options in (options for options in OPTIONS if any(options.keys() <= group.keys() for group in groups)):
            yield self._variant(partial(_told, options), history, steps)
        for mishap in MISHAPS if history else ():
            yield self._variant(Oracle.optimizer, history, steps, mishap)
        for lost in range(1, len(history) + 1):
            yield self._variant(Oracle.optimizer, history[:-lost], steps)
        for rate in sorted(set(steps[-1].learning_rates)):
            for other in OTHERS:
                yield self._variant(partial(_another, other, rate), history, steps)

    def _variant(
        self,
        make: Callable[[Oracle], Optimizers],
        history: Sequence[Step],
        steps: Sequence[Step],
        mishap: Callable[[State], None] | None = None,
    ) -> Tensors:
        oracle = self._new()
        optimizers = make(oracle)
        weights: Tensors = {}
        for place, step in enumerate([*history, *steps]):
            if place == len(history) and mishap is not None:
                for optimizer in optimizers.every:
                    for state in optimizer.state.values():
                        mishap(state)
            if not step.skipped:
                weights = weights_after(oracle, optimizers, step.before, step.gradients, step.learning_rates)
        return weights


def _told(options: dict[str, Any], oracle: Oracle) -> Optimizers:
    optimizers = oracle.optimizer()
    for group in optimizers.param_groups:
        group.update({name: value for name, value in options.items() if name in group})
    return optimizers


def _another(make: Callable[..., torch.optim.Optimizer], rate: float, oracle: Oracle) -> Optimizers:
    return Optimizers([make(oracle.model.parameters(), lr=rate)])
