"""Several listeners follow one training: what they learn about steps, backward passes and scalers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plumbline.recording.backward_passes import BackwardPasses, in_backward
from plumbline.recording.grad_scaler import follow_scaled_steps
from plumbline.recording.optimizer_steps import OptimizerSteps
from plumbline.recording.patching import Patches, wrap
from plumbline.recording.pause import paused


class Told:
    """A listener that records its calls, with the optimizer's class."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self.events.append(f"{type(optimizer).__name__} begins")

    def gradients_ready(self, optimizer: Optimizer) -> None:
        self.events.append("gradients")

    def step_ends(self, optimizer: Optimizer) -> None:
        self.events.append(f"{type(optimizer).__name__} ends")


@pytest.fixture
def listeners() -> Iterator[list[Told]]:
    """Two listeners, each with its own follower."""
    told, handles = [Told(), Told()], []
    for one in told:
        steps = OptimizerSteps(one)
        handles.append(register_optimizer_step_pre_hook(steps.before))
        handles.append(register_optimizer_step_post_hook(steps.after))
    yield told
    for handle in handles:
        handle.remove()


class Wrapping(torch.optim.SGD):
    """Steps another optimizer, which raises on request."""

    raises = False

    def step(self, closure=None):
        inner = torch.optim.Adam(self.param_groups[0]["params"])
        inner.step(closure)
        if self.raises:
            raise MemoryError


def wrapping() -> Wrapping:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return Wrapping([parameter], 0.1)


def test_of_nested_steps_the_outer_one_is_told(listeners):
    wrapping().step()
    for one in listeners:
        assert one.events == ["Wrapping begins", "gradients", "Wrapping ends"]


def test_a_step_after_one_that_raised_is_told(listeners):
    optimizer = wrapping()
    optimizer.raises = True
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.raises = False
    optimizer.step()
    for one in listeners:
        assert one.events == ["Wrapping begins", "gradients", "Wrapping begins", "gradients", "Wrapping ends"]


def test_gradients_are_ready_after_the_closure(listeners):
    wrapping().step(lambda: [one.events.append("closure") for one in listeners])
    for one in listeners:
        assert one.events == ["Wrapping begins", "closure", "gradients", "Wrapping ends"]


def test_nothing_is_told_of_a_paused_step(listeners):
    with paused():
        wrapping().step()
    assert not any(one.events for one in listeners)


@pytest.fixture
def patches() -> Iterator[None]:
    """Undo what a test patches."""
    opened = Patches()
    opened.open()
    yield
    opened.close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_method_of_a_c_class_is_put_back_whatever_is_closed_first(first):
    group = torch.distributed.ProcessGroup
    before, opened = vars(group)["recv"], [Patches(), Patches()]
    for one in opened:
        one.open()
        wrap(group, "recv", lambda run, *args: run(*args))
    opened[first].close()
    opened[1 - first].close()
    assert vars(group)["recv"] is before  # the result of getattr does not bind to a group


@pytest.mark.usefixtures("patches")
def test_backward_passes_are_numbered():
    events = []
    passes = BackwardPasses(lambda *begins: events.append(begins), lambda number: events.append(number))
    passes.install()
    weight, inside = torch.ones(2, requires_grad=True), []
    weight.register_hook(lambda gradient: inside.append(in_backward()))
    for _ in range(2):
        loss = weight.sum()
        loss.backward()
        torch.autograd.grad(weight.sum(), weight)
        assert events[-2][1] == [loss]
    assert [one[0] if isinstance(one, tuple) else one for one in events] == [0, 0, 1, 1]
    assert inside[0]
    assert not in_backward()


@pytest.mark.usefixtures("patches")
def test_the_outermost_step_of_a_scaler_is_followed():
    class Scaler(torch.amp.GradScaler):
        def step(self, optimizer, *args, **kwargs):
            return super().step(optimizer, *args, **kwargs)

    scales = []

    def around(scaler, optimizer, step):
        scales.append(scaler.get_scale())
        return step()

    follow_scaled_steps(around)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    for scaler in (Scaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
    assert scales == [2.0**16]
