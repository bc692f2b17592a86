"""Measurements of blocks compared with known values; measuring changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from plumbline.trainer.balanced.chain import find_chain
from plumbline.trainer.balanced.measurements import LiveBytes
from plumbline.trainer.balanced.partition import StageCosts
from plumbline.trainer.balanced.profile import optimizer_state_bytes, profile
from plumbline.trainer.balanced.stage_plan import BlockCost, Profile, Travelling

CPU = torch.device("cpu")
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def measure(module, batch=BATCH, optimizers=(), repeats=2):
    chain = find_chain(module, lambda: module(batch), 1, CPU)
    interception = chain.interception(module, CPU)
    state = optimizer_state_bytes(module, optimizers)
    with interception.installed():
        return profile(module, chain.runnable(interception, module), batch, CPU, state, optimizers, repeats)


def mixed():
    """Layers with buffers, random numbers, in-place changes, a frozen weight, a mode, and existing gradients."""
    module = nn.Sequential(
        nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(10, 10), nn.Tanh(),
        nn.Linear(10, 3),
    )  # fmt: skip
    module[4].weight.requires_grad_(False)
    module[1].eval()
    module[0].weight.grad = torch.ones(10, 6)
    return module


def test_the_module_is_left_as_it_was(plan):
    module = mixed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tensors = [*module.parameters(), *module.buffers()]
    modes = [layer.training for layer in module.modules()]
    needing = [parameter.requires_grad for parameter in module.parameters()]
    gradient, batch, random_numbers = module[0].weight.grad, BATCH.clone(), torch.get_rng_state()
    plan(module, BATCH, 2, optimizers=[torch.optim.Adam(module.parameters())])
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(one is other for one, other in zip(tensors, [*module.parameters(), *module.buffers()], strict=True))
    assert [layer.training for layer in module.modules()] == modes
    assert [parameter.requires_grad for parameter in module.parameters()] == needing
    assert module[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(10, 6))
    assert all(parameter.grad is None for name, parameter in module.named_parameters() if name != "0.weight")
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert torch.equal(BATCH, batch)


def measured_peak(module, batch, in_flight):
    """Return the peak of live bytes for several micro-batches, all forwards first; gradients exist already."""
    module(batch).sum().backward()
    with LiveBytes() as live:
        outputs = [module(batch) for _ in range(in_flight)]
        while outputs:
            last = outputs.pop()
            last.backward(torch.ones_like(last))
    return live.peak


MODELS = {
    "linear-relu": lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)),
    "no sharing": lambda: nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 3)),
    "views": lambda: nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Unflatten(1, (2, 5)), nn.Flatten(), nn.Linear(10, 3)
    ),
    "passed on": lambda: nn.Sequential(nn.Linear(6, 10), nn.Identity(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)),
    "mixed": lambda: mixed().train(),
    "in place": lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 3)),
}


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_of_all_blocks_is_that_of_the_module(model, in_flight):
    module = MODELS[model]()
    measured = measure(module)
    state = sum(block.state_bytes for block in measured.blocks)
    one = Profile((*measured.blocks, *[BlockCost("after", 0.0, 0, 0, 0)] * (in_flight - 1)), (), measured.travelling)
    # The first of n stages has n micro-batches in flight.
    predicted = StageCosts(one, in_flight, in_flight).peak_bytes(0, len(measured.blocks), 0) - state
    assert predicted == measured_peak(module, BATCH.clone(), in_flight)


def test_what_two_blocks_keep_is_one_tensor_that_travels():
    measured = measure(MODELS["linear-relu"]())
    # Linear keeps its input, the batch, ReLU its output: that is the second Linear's input.
    hidden, output = 8 * 10 * 4, 8 * 3 * 4
    assert [block.saved_bytes for block in measured.blocks] == [0, hidden, hidden]
    assert [block.output_bytes for block in measured.blocks] == [hidden, hidden, output]
    assert measured.travelling == (
        Travelling(hidden, [], [1], [0]),
        Travelling(hidden, [1, 2], [2], [1]),
        Travelling(output, [], [], [2]),
    )


def test_bytes_are_alive_until_their_storage_is_freed():
    there = torch.ones(100)
    with LiveBytes() as live:
        there.mul_(2)
        view = there[:50]
        assert live.now == 0
        made = view * 2
        other = made[:10]
        assert live.now == 200
        del made
        assert live.now == 200
        del other
        assert live.now == 0
        assert live.peak == 200


OPTIMIZERS = {
    "none": (lambda weights: [], 2, 0),
    "sgd": (lambda weights: [torch.optim.SGD(weights, 0.1)], 2, 0),
    "momentum": (lambda weights: [torch.optim.SGD(weights, 0.1, momentum=0.9)], 3, 0),
    "adam": (lambda weights: [torch.optim.Adam(weights)], 4, 4),  # and a step, four bytes, for each parameter
    "fused": (lambda weights: [torch.optim.AdamW(weights, fused=True)], 4, 4),
    "rmsprop": (lambda weights: [torch.optim.RMSprop(weights, centered=True)], 4, 4),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_bytes_are_parameters_gradients_and_optimizer_state(kind):
    make, times, each = OPTIMIZERS[kind]
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
    assert [block.state_bytes for block in measure(module, optimizers=make(module.parameters())).blocks] == [
        70 * 4 * times + 2 * each,
        0,
    ]


def test_an_optimizer_of_sparse_gradients_has_state_bytes():
    module = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2))
    optimizer = torch.optim.SparseAdam(module[0].parameters())
    first, _ = measure(module, torch.arange(8), [optimizer]).blocks
    assert first.state_bytes == 20 * 6 * 4 * 4
    assert first.optimizer_seconds > 0


def test_a_frozen_parameter_has_no_gradient_and_no_state():
    module = nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10, affine=False))
    module[0].requires_grad_(False)
    optimizer = torch.optim.Adam(module.parameters())
    assert [block.state_bytes for block in measure(module, optimizers=[optimizer]).blocks] == [240, 2 * 40 + 8]


def test_the_optimizer_is_not_stepped_and_nobody_sees_a_step():
    module = MODELS["linear-relu"]()
    optimizer = torch.optim.Adam(module.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the optimizer's step
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("its own"))
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("every"))
    weights = [parameter.clone() for parameter in module.parameters()]
    try:
        measured = measure(module, optimizers=[optimizer])
        assert measured.blocks[0].state_bytes == 70 * 4 * 4 + 2 * 4
        assert not seen
        assert not optimizer.state
        assert all(map(torch.equal, module.parameters(), weights))
        optimizer.step()
        assert seen == ["every", "its own"]
    finally:
        handle.remove()


def test_tied_weights_are_noted_with_their_blocks():
    embedding, head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
    head.weight = embedding.weight
    measured = measure(nn.Sequential(embedding, nn.Linear(6, 6), head), torch.arange(8))
    assert [(tie.name, tie.blocks, tie.bytes) for tie in measured.ties] == [("0.weight", (0, 2), 20 * 6 * 4 * 2)]


def test_tied_weights_are_stepped_once_a_stage():
    embedding, head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
    head.weight = embedding.weight
    module = nn.Sequential(embedding, nn.Identity(), head)
    measured = measure(module, torch.arange(8), [torch.optim.Adam(module.parameters())])
    (tie,), (first, _, last) = measured.ties, measured.blocks
    assert tie.optimizer_seconds == min(first.optimizer_seconds, last.optimizer_seconds) > 0
    both = StageCosts(measured, 1, 1).optimizer_seconds(0, 3)
    assert both == pytest.approx(max(first.optimizer_seconds, last.optimizer_seconds))


@pytest.mark.parametrize("sparse", [False, True])
def test_what_has_more_weights_to_step_takes_longer(sparse):
    # A sparse gradient has only a few rows, and so has its step.
    module = nn.Sequential(nn.Embedding(1_000_000, 8, sparse=sparse), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    module[3].requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    large, small, none, frozen = measure(module, torch.arange(8), [optimizer], repeats=5).blocks
    assert large.optimizer_seconds > 0 < small.optimizer_seconds
    assert sparse or large.optimizer_seconds > small.optimizer_seconds  # 8,000,000 weights and 72
    assert none.optimizer_seconds == frozen.optimizer_seconds == 0
    assert not any(block.optimizer_seconds for block in measure(module, torch.arange(8)).blocks)


def test_more_work_takes_longer():
    module = nn.Sequential(nn.Linear(6, 1500), nn.Linear(1500, 1500), nn.Linear(1500, 2))
    small, large, last = (block.seconds for block in measure(module, repeats=5).blocks)
    assert 0 < max(small, last) < large  # it has 250 times the products of either


def test_a_block_without_gradients_has_no_backward():
    module = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 300))
    module.requires_grad_(False)
    assert [block.saved_bytes for block in measure(module).blocks] == [0, 0]
