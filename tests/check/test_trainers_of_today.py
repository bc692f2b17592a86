"""`plumbline check` on techniques of torchtitan and Megatron.

Optimizers in containers, sums instead of means, flex_attention, and several generator states.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.function import CheckedFunction, check_function
from plumbline.core.outcome import Outcome

WORLD = 2


class Container(torch.optim.Optimizer):
    """Two optimizers in one object, like torchtitan's."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim == 1]
        self.optimizers = [torch.optim.AdamW(matrices, 0.01), torch.optim.SGD(others, 0.1)]
        super().__init__([*matrices, *others], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


class Tracker:
    """Keeps generator states for parts of a forward, like Megatron."""

    def __init__(self) -> None:
        self.states = {"parts": torch.Generator().manual_seed(5).get_state()}

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = states

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states["parts"])
        yield
        self.states["parts"] = torch.get_rng_state()
        torch.set_rng_state(before)


class Attention(nn.Module):
    """Attention as a higher-order operator."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, values: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        heads = self.inputs(values).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        return self.output(flex_attention(*heads).transpose(1, 2).flatten(2))


class WithOwnState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def forward(self, values: Tensor) -> Tensor:
        library: Any = sys.modules["library_of_parts"]
        with library._CUDA_RNG_STATE_TRACKER.fork():
            hidden = nn.functional.dropout(self.layers[0](values), 0.5)
        return self.layers[1](hidden)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, divisor: float = 1.0) -> list[float]:
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 6, 8)).square().mean() / divisor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def in_a_container() -> list[float]:
    model = DistributedDataParallel(layers())
    return fit(model, Container(model))


def summed(scale: float = 1.0) -> list[float]:
    model: Any = fully_shard(layers())
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for one in model.parameters() if scale != 1.0 else ():
        one.register_post_accumulate_grad_hook(lambda held: held.grad.mul_(scale))
    return fit(model, optimizer, WORLD)


def summed_on_a_mesh() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)}
    model: Any = parallelize_module(layers(), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(mesh["dp"].get_local_rank())
    for _ in range(2):
        (model(torch.randn(4, 8)).full_tensor().square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def with_own_state() -> list[float]:
    library: Any = types.ModuleType("library_of_parts")
    library._CUDA_RNG_STATE_TRACKER = Tracker()
    sys.modules[library.__name__] = library
    torch.manual_seed(0)
    model = DistributedDataParallel(WithOwnState())
    return fit(model, torch.optim.SGD(model.parameters(), 0.1))


def attending() -> list[float]:
    from torch.nn.attention import flex_attention

    flex_attention._validate_device = lambda *tensors: None  # type: ignore[assignment]
    torch.manual_seed(0)
    model = DistributedDataParallel(Attention())
    return fit(model, torch.optim.SGD(model.parameters(), 0.1))


def check(train: Callable[[], list[float]], steps: int = 3) -> CheckedFunction:
    checked = check_function(train, WORLD, steps=steps)
    assert not any(end.has_failed for end in checked.ends), checked.ends
    return checked


def test_the_updates_of_optimizers_in_a_container_are_judged() -> None:
    check(in_a_container).assert_right(require_full=True)


def test_a_sum_over_ranks_is_right_if_the_script_asks_fsdp_for_it() -> None:
    checked = check(summed)
    checked.assert_right(require_full=True)
    (finding,) = [one for one in checked.findings if one.check == "gradients"]
    assert "the sum over 2 ranks of what" in finding.message
    assert "set_gradient_divide_factor()" in finding.message


def test_a_sum_is_right_beside_parts_whose_forward_returns_dtensors() -> None:
    checked = check_function(summed_on_a_mesh, 4, steps=2)
    assert not any(end.has_failed for end in checked.ends), checked.ends
    checked.assert_right(require_full=True)


def test_another_factor_than_the_script_asks_for_is_not_praised() -> None:
    (finding,) = [one for one in check(partial(summed, 0.5)).findings if one.check == "gradients"]
    assert finding.outcome is not Outcome.PASSED


def test_states_that_a_library_keeps_for_generators_are_those_of_the_forward() -> None:
    checked = check(with_own_state)
    checked.assert_right(require_full=True)
    assert checked.values == check(with_own_state, steps=1).values


@pytest.mark.skipif(find_spec("torch.nn.attention.flex_attention") is None, reason="this torch has no flex_attention")
def test_operators_that_take_functions_are_replayed() -> None:
    check(attending).assert_right(require_full=True)
