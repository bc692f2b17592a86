"""The blocks found in a module's forward: they compose to it, and finding them changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plumbline.trainer import MisconfigurationError
from plumbline.trainer.balanced.chain import find_chain

CPU = torch.device("cpu")
BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(1))


class Walked(nn.Module):
    """A list of layers between an entry and a head, with a reshape in between that is not a module."""

    def __init__(self):
        super().__init__()
        self.entry, self.head = nn.Linear(6, 5), nn.Linear(10, 2)
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])

    def forward(self, inputs):
        value = self.entry(inputs)
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return self.head(torch.cat([value, -value], 1)).squeeze(-1)


class Layer(nn.Module):
    """A layer with a residual connection and dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(6), nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, value):
        return value + self.drop(self.inner(self.norm(value)))


class Language(nn.Module):
    """Adds positions in the forward; the head shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, 6), nn.Embedding(5, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        value = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            value = layer(value)
        return self.head(self.norm(value))


class Skipping(Walked):
    """Uses the entry's output again after the layers."""

    def forward(self, inputs):
        first = value = self.entry(inputs)
        for layer in self.layers:
            value = layer(value)
        return self.head(torch.cat([first, value], 1))


class Declaring(Language):
    """Declares two of the layers as one block; the rest joins the block before."""

    def configure_blocks(self):
        return [self.tokens, self.layers[0], self.layers[2]]


def sequential():
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)), nn.Linear(6, 2))


def with_repeats():
    layer, activation = nn.Linear(6, 6), nn.Tanh()
    return nn.Sequential(layer, activation, layer, activation)


CASES = {
    "sequential": (sequential, BATCH, ["0", "1.0", "1.1", "2"]),
    "repeats": (with_repeats, BATCH, ["0", "1", "0", "1"]),
    "walked": (Walked, BATCH, ["entry", "layers.0", "layers.1", "head"]),
    "language": (Language, TOKENS, ["tokens", "positions", "layers.0", "layers.1", "layers.2", "norm", "head"]),
    "skipping": (Skipping, BATCH, ["entry", "layers.0", "layers.1", "head"]),
    "declaring": (Declaring, TOKENS, ["tokens", "layers.0", "layers.2"]),
}


def find(module, batch, devices=2):
    declare = getattr(module, "configure_blocks", lambda: None)
    return find_chain(module, lambda: module(batch), devices, CPU, declare())


@pytest.mark.parametrize("case", CASES)
def test_the_blocks_are_those_between_which_one_may_cut(case):
    make, batch, names = CASES[case]
    assert [block.name for block in find(make(), batch).blocks] == names


@pytest.mark.parametrize("case", CASES)
def test_blocks_one_after_the_other_compute_what_the_module_does(case):
    make, batch, _ = CASES[case]
    module = make()
    chain = find(module, batch)
    interception = chain.interception(module, CPU)
    with torch.no_grad(), torch.random.fork_rng([]):
        expected = module(batch)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with interception.installed(), torch.no_grad(), torch.random.fork_rng([]):
        value = ()
        for block in chain.runnable(interception, module):
            value = block.run(value, batch)
    assert torch.equal(value, expected)
    assert all(buffer.shape == buffers[name].shape for name, buffer in module.named_buffers())


@pytest.mark.parametrize("case", CASES)
def test_finding_blocks_changes_nothing(case):
    make, batch, _ = CASES[case]
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = {name: set(layer.__dict__) for name, layer in module.named_modules()}
    random_numbers = torch.get_rng_state()
    find(module, batch)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert {name: set(layer.__dict__) for name, layer in module.named_modules()} == attributes
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    assert torch.equal(torch.get_rng_state(), random_numbers)


@pytest.mark.parametrize("case", CASES)
def test_each_of_them_is_planned(plan, case):
    make, batch, names = CASES[case]
    found = plan(make(), batch, 2, counts=[2])
    assert [block.name for block in found.blocks] == names
    assert all(seconds > 0 for seconds in found.predicted.stage_seconds)


def test_tied_weights_are_noted(plan):
    found = plan(Language(), TOKENS, 2, counts=[2])
    assert [(tie.name, tie.blocks) for tie in found.ties] == [("tokens.weight", (0, 6))]


def test_batch_norm_cannot_take_one_sample_so_there_are_fewer_micro_batches(plan):
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    assert plan(module, BATCH, 2).micro_batches in (1, 2)


class Measuring(Walked):
    """The size of the first layer's output decides what follows."""

    def forward(self, inputs):
        value = self.layers[0](self.entry(inputs))
        return self.head(torch.cat([self.layers[1](value * value.norm().item()), value], 1))


class Stashing(Walked):
    """The first layer stores a tensor in an attribute, which is used at the end."""

    def forward(self, inputs):
        value = self.entry(inputs)
        return self.head(torch.cat([self.layers[1](self.layers[0](value)), value + self.layers[0].kept], 1))


class Keeping(nn.Linear):
    def forward(self, inputs):
        self.kept = inputs.mean()
        return super().forward(inputs)


class Filling(Walked):
    """Fills rows of a tensor with the layers' outputs."""

    def forward(self, inputs):
        rows = torch.zeros(4, 10)
        value = self.entry(inputs)
        rows[:, :5] = self.layers[0](value)
        rows[:, 5:] = self.layers[1](value)
        return self.head(rows)


class Centering(Walked):
    """A buffer that is used at the start follows a layer's output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(5))

    def forward(self, inputs):
        value = self.layers[0](self.entry(inputs) - self.center)
        self.center.mul_(0.9).add_(value.mean(0), alpha=0.1)
        return self.head(torch.cat([self.layers[1](value), value], 1))


class Overwriting(Walked):
    """Changes half of the entry's output, and then uses both."""

    def forward(self, inputs):
        value = self.entry(inputs)
        half = value[:, :3]
        half += self.layers[0](value.clone())[:, :3]
        return self.head(torch.cat([self.layers[1](value), value], 1))


def stashing():
    module = Stashing()
    module.layers[0] = Keeping(5, 5)
    return module


OBSTACLES = {
    "values": (
        Measuring,
        "entry, layers.0, layers.1 \\+ head",
        "layers.0 or the code after it reads values .* \\(item\\)",
    ),
    "attribute": (stashing, "entry, layers.0 \\+ layers.1, head", "layers.0 makes a tensor .* not returned"),
    "filled": (
        Filling,
        "entry, layers.0, layers.1 \\+ head",
        "layers.0 or the code after it modifies in place a tensor that no block computes",
    ),
    "buffer": (
        Centering,
        "entry, layers.0 \\+ layers.1 \\+ head",
        "layers.0 or the code after it changes center in place",
    ),
    "half": (
        Overwriting,
        "entry \\+ layers.0, layers.1, head",
        "layers.0 or the code after it modifies in place a tensor",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_cannot_be_parted_is_refused_with_what_prevents_it(case):
    make, blocks, reason = OBSTACLES[case]
    with pytest.raises(MisconfigurationError, match=rf"\({blocks}\), too few for 5 devices.*{reason}"):
        find(make(), BATCH, devices=5)


def test_a_module_with_too_few_calls_is_refused():
    with pytest.raises(MisconfigurationError, match=r"4 blocks \(entry, layers.0, layers.1, head\), too few for 5"):
        find(Skipping(), BATCH, devices=5)
