"""Which blocks are found, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.trainer import MisconfigurationError
from harness.trainer.balanced.blocks import compose, find_blocks

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def names(module, batch=BATCH):
    return [block.name for block in find_blocks(module, batch)]


class Declared(nn.Module):
    """Its forward is entry, layers, head; ``left_out`` is what it forgets to declare."""

    def __init__(self, left_out=None):
        super().__init__()
        self.entry, self.head = nn.Linear(6, 5), nn.Linear(5, 2)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)])
        self.left_out = left_out

    def configure_blocks(self):
        parts = [self.entry, *self.layers, self.head]
        return [part for index, part in enumerate(parts) if index != self.left_out]

    def forward(self, inputs):
        value = self.entry(inputs)
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


def test_a_sequential_has_its_children():
    assert names(nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))) == ["0", "1", "2"]


def test_a_nested_sequential_is_opened_where_several_of_its_parts_have_weights():
    one = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    several = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    assert names(nn.Sequential(one, several)) == ["0", "1.0", "1.1", "1.2"]


def test_a_child_in_two_places_is_two_blocks():
    layer, act = nn.Linear(6, 6), nn.Tanh()
    module = nn.Sequential(layer, act, layer, act)
    blocks = find_blocks(module, BATCH)
    assert len(blocks) == 4
    assert blocks[0].holds == blocks[2].holds == ("0.weight", "0.bias")
    assert torch.equal(compose(blocks, BATCH), module(BATCH))


def test_declared_blocks_have_their_names_in_the_module():
    module = Declared()
    blocks = find_blocks(module, BATCH)
    assert [block.name for block in blocks] == ["entry", "layers.0", "layers.1", "head"]
    assert blocks[1].holds == ("layers.0.0.weight", "layers.0.0.bias")
    assert torch.equal(compose(blocks, BATCH), module(BATCH))


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_wrong_declaration_is_refused(left_out):
    with pytest.raises(MisconfigurationError, match=r"The blocks of Declared \(entry, .*its forward .* shape \(4, 2\)"):
        find_blocks(Declared(left_out), BATCH)


def test_dropout_and_batch_norm_are_no_wrong_declaration():
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_numbers = torch.get_rng_state()
    assert len(find_blocks(module, BATCH)) == 4
    assert torch.equal(torch.get_rng_state(), random_numbers)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_other_weights_than_the_module_s_are_refused():
    module = Declared()
    module.configure_blocks = lambda: [nn.Linear(6, 2)]
    with pytest.raises(MisconfigurationError, match="with weights that are not the module's"):
        find_blocks(module, BATCH)


@pytest.mark.parametrize("returned", [[], "entry", 3, [torch.tanh]])
def test_what_is_no_list_of_modules_is_refused(returned):
    module = Declared()
    module.configure_blocks = lambda: returned
    with pytest.raises(MisconfigurationError, match="modules"):
        find_blocks(module, BATCH)


def test_a_forward_that_never_repeats_itself_is_refused():
    class Unsteady(Declared):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            return super().forward(inputs) * self.calls

    with pytest.raises(MisconfigurationError, match="something else each time"):
        find_blocks(Unsteady(), BATCH)


def test_a_module_that_says_nothing_about_its_blocks_is_refused():
    with pytest.raises(MisconfigurationError, match=r"LSTM is not a Sequential: write a method configure_blocks\(\)"):
        find_blocks(nn.LSTM(6, 3), BATCH)


def test_a_batch_that_the_module_cannot_take_is_refused_with_its_error():
    with pytest.raises(MisconfigurationError, match="Sequential cannot be run on the batch: RuntimeError"):
        find_blocks(nn.Sequential(nn.Linear(5, 2)), BATCH)
