"""Compiled modules are recorded and replayed eagerly; recording does not change how often or how they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from replaying import Recording, assert_exact, recording
from torch import Tensor, nn

from plumbline.recording import module_calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Graphs:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        return graph.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def step(model: nn.Module, recorded: Recording | None) -> None:
    loss = model(torch.randn(4, 8)).pow(2).mean()
    if recorded is None:
        loss.backward()
    else:
        model.zero_grad()
        recorded.backward(loss)


def compiled_module(backend: Graphs) -> nn.Module:
    return torch.compile(nn.Sequential(Block(), Block()), backend=backend)


def compiled_in_place(backend: Graphs) -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model.compile(backend=backend)
    return model


def compiled_blocks(backend: Graphs) -> nn.Module:
    return nn.Sequential(
        torch.compile(Block(), backend=backend), nn.Linear(8, 8), torch.compile(Block(), backend=backend)
    )


def compiled_forward(backend: Graphs) -> nn.Module:
    model = nn.Sequential(Block(), Block())
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("make", [compiled_module, compiled_in_place, compiled_blocks, compiled_forward])
@pytest.mark.parametrize("warm", [True, False], ids=["compiled-before", "compiled-while-recorded"])
def test_recording_compiles_nothing_again(make: Any, warm: bool, graphs: Graphs) -> None:
    reference = Graphs()
    step(make(reference), None)
    torch._dynamo.reset()

    model = make(graphs)
    if warm:
        step(model, None)
    for _ in range(2):
        with recording() as recorded:
            step(model, recorded)
            step_gradients_are_exact(recorded, model)
        step(model, None)
    assert graphs.compiled == reference.compiled


def step_gradients_are_exact(recorded: Recording, model: nn.Module) -> None:
    assert recorded.calls.calls
    assert_exact(recorded, model)


class Noisy(Block):
    """Draws random numbers without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn_like(x) * torch.rand(len(x), 1, dtype=x.dtype)


def whole() -> nn.Module:
    return torch.compile(nn.Sequential(Block(), Noisy()))


def blocks() -> nn.Module:
    model = nn.Sequential(Block(), nn.Dropout(0.1), torch.compile(Noisy()))
    model[0].compile()
    return model


@pytest.mark.parametrize("make", [pytest.param(whole, marks=pytest.mark.nightly), blocks])
def test_what_compiled_code_draws_is_drawn_again(make: Any) -> None:
    """Dropout in TorchInductor's code has different masks than without a compiler."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    with recording() as recorded:
        for _ in range(2):
            model.zero_grad()
            before = torch.get_rng_state()
            recorded.backward(model(torch.randn(4, 8)).pow(2).mean())
            drawn = torch.get_rng_state()
            assert not torch.equal(drawn, before)
            assert_exact(recorded, model)
            assert torch.equal(torch.get_rng_state(), drawn)
    torch._dynamo.reset()


def test_a_compiled_step_is_left_alone(graphs: Graphs) -> None:
    model = nn.Sequential(Block(), Block())

    @torch.compile(backend=graphs)
    def forward(x: Tensor) -> Tensor:
        return model(x).pow(2).mean()

    forward(torch.randn(4, 8)).backward()
    before = graphs.compiled
    with recording() as recorded:
        recorded.backward(forward(torch.randn(4, 8)))
        gradients, uncovered = recorded.total()
    forward(torch.randn(4, 8)).backward()
    assert graphs.compiled == before
    assert not gradients
    assert set(uncovered) == set(model.parameters())


@pytest.mark.parametrize("function", ["get_eval_frame_callback", "set_eval_frame"])
def test_it_is_known_where_frames_are_compiled_also_by_torch_2_4(
    function: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.4 has only the second of the two functions."""
    if function == "set_eval_frame":
        monkeypatch.delattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback")

    def look() -> None:
        seen.append(module_calls._is_evaluated_by_dynamo())

    seen: list[bool] = []
    module_calls._leave_uncompiled(look)
    module_calls._leave_uncompiled(module_calls._is_evaluated_by_dynamo)

    @torch.compile(backend=graphs)
    def compiled(x: Tensor) -> Tensor:
        x = x + 1
        look()
        return x * 2

    look()
    compiled(torch.zeros(2))
    look()
    assert seen == [False, True, False]
    assert graphs.compiled == 2, "what follows was compiled too: the callback is back"


@pytest.mark.parametrize("make", [compiled_module, compiled_in_place, compiled_blocks, compiled_forward])
def test_compiled_code_whose_numbers_cannot_be_drawn_again_is_named_as_such(make: Any) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            torch.rand(())
            return graph.forward(*values)

        return run

    torch._dynamo.reset()
    model = make(backend)
    with recording() as recorded:
        step(model, recorded)
        gradients, uncovered = recorded.total()
    torch._dynamo.reset()
    assert not gradients
    assert all("compiled code draws random numbers that check cannot repeat" in why for why in uncovered.values())
    assert set(uncovered) == set(model.parameters())


def test_a_compiled_training_step_is_recorded(plumbline):
    """The backward runs inside the compiled function, where the recorder must not be compiled."""

    def train():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @torch.compile(backend="eager")
        def pass_back(rows):
            model(rows).square().mean().backward()

        for _ in range(2):
            optimizer.zero_grad()
            pass_back(torch.randn(8, 4))
            optimizer.step()

    (one,) = plumbline.check(train, ranks=2, steps=2).trainings
    assert one.training.ranks[0].error == ""
    assert len(one.training.ranks[0].steps) == 2
