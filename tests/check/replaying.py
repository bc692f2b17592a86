"""A training loop that is recorded, for tests of replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.replay.exact_gradients import ExactGradients, ExactPass
from plumbline.replay.tracked_calls import TrackedCalls


class Recording:
    """Follows a script's calls; ``backward`` stands in for the patch that counts backward passes."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.passes = 0
        self.calls = TrackedCalls(lambda: self.number)
        self._exact = ExactGradients(self.calls, lambda gradient, parameter: gradient.clone())

    def backward(self, *roots: Tensor, **options: object) -> None:
        self.number = self.passes
        self.calls.pass_begins(self.number, roots)
        try:
            torch.autograd.backward(roots, **options)  # type: ignore[arg-type]
        finally:
            self.number = None
            self.passes += 1

    def compute(self, **options: Any) -> dict[int, ExactPass]:
        return self._exact.compute(**options)

    def exact(self, **options: Any) -> dict[int, ExactPass]:
        result = self.compute(**options)
        assert not self.calls.unrecorded, set(self.calls.unrecorded.values())
        return result

    def total(self) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, str]]:
        """The sum of all gradients since the last step, and why some are unknown."""
        gradients: dict[nn.Parameter, Tensor] = {}
        uncovered: dict[nn.Parameter, str] = {}
        for one in self.exact().values():
            uncovered.update(one.uncovered)
            for parameter, gradient in one.gradients.items():
                gradients[parameter] = gradients.get(parameter, torch.zeros(())) + gradient
        return gradients, uncovered


@contextmanager
def recording() -> Iterator[Recording]:
    one = Recording()
    one.calls.start()
    try:
        yield one
    finally:
        one.calls.stop()


def assert_exact(recorded: Recording, module: nn.Module, digits: Callable[[Tensor], float] | None = None) -> None:
    """Every gradient of ``module`` equals that of its replays, up to float32 rounding."""
    gradients, uncovered = recorded.total()
    assert not uncovered, set(uncovered.values())
    largest = max(float(one.grad.abs().max()) for one in module.parameters() if one.grad is not None)
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert parameter not in gradients or not gradients[parameter].any(), name
            continue
        error = float((parameter.grad - gradients[parameter]).abs().max())
        assert gradients[parameter].dtype == torch.float64, name
        assert error <= 1e-5 * largest, (name, error, largest)
