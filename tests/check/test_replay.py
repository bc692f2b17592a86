"""A replay computes the exact gradient of the script's calls, and leaves no trace."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed_models import EXAMPLES, Casting, Checkpointed, Example, Lists
from replaying import Recording, assert_exact, recording
from torch import Tensor, nn

from plumbline.replay.parameter_copies import ParameterCopies
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.replay import replay
from plumbline.replay.tracked_calls import differentiable

pytestmark = pytest.mark.usefixtures("one_thread")  # the models are tiny: more threads are slower


every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())


def forward_backward(example: Example, model: nn.Module, recorded: Recording, batches: list[Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = example.loss(model(batch.clone()))
        recorded.backward(loss)
        losses.append(loss.item())
    return losses


@every_example
def test_the_exact_gradient_is_that_of_the_training(example: Example) -> None:
    torch.manual_seed(1)
    model = example.make()
    with recording() as recorded:
        forward_backward(example, model, recorded, [example.batch() for _ in range(2)])
        assert_exact(recorded, model)


@pytest.mark.parametrize(
    "name", sorted(EXAMPLES.keys() - {"drawing", "drop-path", "own-generator", "casting", "lists"})
)
def test_the_exact_gradient_is_that_of_a_training_in_float64(name: str) -> None:
    example = EXAMPLES[name]
    torch.manual_seed(2)
    # a spectral norm updates its buffers in each call, in float32
    model, batches = example.make(), [example.batch() for _ in range(1 if "norms" in name else 2)]
    twin = example.make()
    twin.load_state_dict(model.state_dict())
    twin.double()
    _without_dropout(model)  # masks differ between precisions
    _without_dropout(twin)
    with recording() as recorded:
        cotangents = []
        for batch in batches:
            outputs = differentiable(model(batch.clone()))
            cotangents.append([torch.randn_like(one) for one in outputs])
            recorded.backward(*outputs, grad_tensors=cotangents[-1])
        gradients, uncovered = recorded.total()
    assert not uncovered

    for batch, arrived in zip(batches, cotangents, strict=True):
        outputs = differentiable(twin(batch.double() if batch.is_floating_point() else batch))
        torch.autograd.backward(outputs, [one.double() for one in arrived])
    scale = max(float(one.grad.abs().max()) for one in twin.parameters() if one.grad is not None)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert (ours in gradients) == (theirs.grad is not None)
        if theirs.grad is not None:
            assert float((gradients[ours] - theirs.grad).abs().max()) <= 1e-12 * scale


def test_a_sparse_gradient_is_recomputed() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(12, 8, sparse=True), nn.Linear(8, 4))
    with recording() as recorded:
        recorded.backward(model(torch.randint(0, 12, (4, 6))).pow(2).mean())
        gradients, uncovered = recorded.total()
    assert not uncovered
    for one in model.parameters():
        assert torch.allclose(gradients[one].float(), one.grad.to_dense(), rtol=1e-5, atol=1e-8)


def _without_dropout(model: nn.Module) -> None:
    for one in model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
        elif isinstance(one, (nn.MultiheadAttention, nn.RNNBase)):
            one.dropout = 0.0


@every_example
def test_a_native_replay_gives_the_gradient_bit_for_bit(example: Example) -> None:
    torch.manual_seed(3)
    model = example.make()
    with recording() as recorded:
        forward_backward(example, model, recorded, [example.batch()])
        found: dict[nn.Parameter, Tensor] = {}

        def receive(number: int, parameter: nn.Parameter, gradient: Tensor) -> None:
            found[parameter] = found[parameter] + gradient if parameter in found else gradient.clone()

        (call,) = recorded.calls.pending()
        with recorded.calls.paused():
            replay(call, ReplayPrecision.NATIVE, receive, ParameterCopies(ReplayPrecision.NATIVE))
    for parameter in model.parameters():
        assert (parameter.grad is None and parameter not in found) or torch.equal(parameter.grad, found[parameter])


@every_example
def test_recording_and_replaying_change_nothing(example: Example) -> None:
    def train(*, check: bool) -> tuple[list[float], dict[str, Tensor], Tensor, float]:
        torch.manual_seed(4)
        random.seed(4)
        model = example.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        with recording() as recorded:
            if not check:
                recorded.calls.stop()
            for _ in range(3):
                losses += forward_backward(example, model, recorded, [example.batch(), example.batch()])
                if check:
                    attributes = [(vars(one), dict(vars(one))) for one in model.modules()]
                    recorded.exact()
                    assert all(now == before for now, before in attributes if not _has_tensor_lists(before))
                optimizer.step()
                optimizer.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return losses, state, torch.get_rng_state(), random.random()

    plain, checked = train(check=False), train(check=True)
    assert plain[0] == checked[0]
    assert all(torch.equal(plain[1][name], checked[1][name]) for name in plain[1])
    assert torch.equal(plain[2], checked[2])
    assert plain[3] == checked[3]


def _has_tensor_lists(attributes: dict[str, object]) -> bool:
    """Tensors in lists cannot be compared with ==."""
    return any(isinstance(one, (list, dict, Tensor)) for one in attributes.values())


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "norm": lambda: nn.LayerNorm(8),
    "batch-norm": lambda: nn.BatchNorm1d(8),
    "dropout": lambda: nn.Dropout(0.3),
    "in-place": lambda: nn.LeakyReLU(inplace=True),
    "gelu": nn.GELU,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "casting": Casting,
    "lists": Lists,
}


@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    batches=st.lists(st.integers(2, 6), min_size=1, max_size=3),
    nested=st.booleans(),
    dtype=st.sampled_from([None, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=25, deadline=None)
def test_random_models(
    layers: list[str], batches: list[int], nested: bool, dtype: torch.dtype | None, seed: int
) -> None:
    torch.manual_seed(seed)
    # An in-place layer must not overwrite an output that another layer's backward needs.
    layers = [name for index, name in enumerate(layers) if name != "in-place" or layers[:index][-1:] != ["in-place"]]
    model = nn.Sequential(nn.Linear(8, 8), *(LAYERS[name]() for name in layers), nn.Linear(8, 2))
    model = nn.Sequential(nn.Tanh(), model) if nested else model
    with recording() as recorded:
        for size in batches:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(size, 8)).float().sin().sum()
            recorded.backward(loss)
        gradients, uncovered = recorded.total()
    assert not uncovered
    wanted = [one for one in model.parameters() if one.grad is not None]
    error = sum(float((one.grad - gradients[one]).pow(2).sum()) for one in wanted)
    size = sum(float(gradients[one].pow(2).sum()) for one in wanted)
    # a batch norm over two rows may divide by a tiny number
    assert error <= (64 * torch.finfo(dtype or torch.float32).eps * len(layers)) ** 2 * size or "batch-norm" in layers


class Unchangeable(dict[str, int]):
    def update(self, *_: object, **__: object) -> None:
        raise TypeError

    clear = update


class Configured(nn.Module):
    """Has immutable settings, like diffusers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Unchangeable(times=2)
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.settings["times"]


def test_a_module_may_have_a_dict_that_forbids_changes() -> None:
    model = Configured()
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 3)).square().sum())
        assert_exact(recorded, model)
