"""Numbers that a step reads from buffers, weights and activations: stages agree on them, or are not divided."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plumbline.trainer import MisconfigurationError, Module, Trainer
from plumbline.trainer.balanced.chain import find_chain
from plumbline.trainer.balanced.stage_training import keep_stage
from plumbline.trainer.module import in_mode

CPU = torch.device("cpu")

WAYS = {
    "item": lambda tensor: tensor.item() > 2,
    "int": lambda tensor: int(tensor) > 2,
    "float": lambda tensor: float(tensor) > 2,
    "bool": lambda tensor: bool(tensor > 2),
    "not": lambda tensor: not tensor <= 2,
    "tolist": lambda tensor: tensor.reshape(1).tolist()[0] > 2,
    "numpy": lambda tensor: tensor.detach().numpy() > 2,
    "equal": lambda tensor: not torch.equal(tensor > 2, torch.tensor(False)),
    "nonzero": lambda tensor: len((tensor > 2).reshape(1).nonzero()) == 1,
}
"""Ways to ask whether a tensor is more than 2."""


class Counting(nn.Module):
    """A layer that counts its calls in training, and uses the count."""

    def __init__(self, way, how):
        super().__init__()
        self.linear, self.way, self.how = nn.Linear(3, 3).double(), way, how
        self.register_buffer("count", torch.zeros(3))
        self.calls, self.many = 0, False

    def forward(self, value):
        if self.training:
            self.calls += 1
            match self.how:
                case "assigned":
                    self.count = self.count + 1
                case "in place":
                    self.count.mul_(1).add_(1)
                case _:
                    self.count += 1
        value = self.linear(value) + self.count
        match self.how:
            case "returned":
                return value, WAYS[self.way](self.count.mean())
            case "calls returned":
                return value, self.calls > 2
            case "attribute":
                self.many = WAYS[self.way](self.count.mean())
        return value


class Chooser(nn.Module):
    """Four layers; each of ``choices`` doubles the output of one, or does not.

    A choice has the layer's number, the deciding value, the way to ask, and a mode in which it is left out. The
    deciding value may be a count of the model or of its second layer, a weight, or the layer's output.
    """

    SOURCES = ("seen", "block", "weight", "value")
    COUNTED = ("in place", "assigned", "from values")
    HOW = ("plain", "in place", "assigned", "returned", "calls returned", "attribute")

    def __init__(self, choices, counted_before=0, counted="in place", how="plain"):
        super().__init__()
        self.choices, self.counted_before, self.counted = choices, counted_before, counted
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))
        self.layers[1] = Counting(choices[0][2] if choices else "item", how)
        self.register_buffer("seen", torch.zeros(()))
        for weight in self.parameters():
            weight.data = torch.randint(-2, 3, weight.shape).double()

    def forward(self, value):
        for number, layer in enumerate(self.layers):
            many = False
            if number == self.counted_before and self.training:
                self.see(value)
            value = layer(value)
            if isinstance(value, tuple):
                value, many = value
            if number >= 1:
                many = many or self.layers[1].many
            for at, source, way, left_out in self.choices:
                if at == number and left_out != ("train" if self.training else "evaluate"):
                    many |= WAYS[way](self.source(source, value))
            value = value * (2 if many else 1)
        if self.counted_before == 4 and self.training:
            self.see(value)
        return value

    def see(self, value):
        match self.counted:
            case "in place":
                self.seen += 1
            case "assigned":
                self.seen = self.seen + 1
            case "from values":
                self.seen.mul_(0.5).add_(value.detach().sum())

    def source(self, name, value):
        match name:
            case "seen":
                return self.seen
            case "block":
                return self.layers[1].count.mean()
            case "weight":
                return self.layers[3].weight.sum()
            case "value":
                return value.sum()


BATCHES = [("train", 0), ("train", 1), ("evaluate", 2), ("train", 3), ("train", 4), ("evaluate", 5)]


def batch(seed):
    return torch.randint(-2, 3, (2, 3), generator=torch.Generator().manual_seed(seed)).double()


def in_one(module):
    """Return the outputs for all batches, and the final buffers."""
    outputs = []
    for mode, seed in BATCHES:
        with in_mode(module, training=mode == "train"):
            outputs.append(module(batch(seed)))
    return outputs, dict(module.named_buffers())


def in_stages(module, chain, firsts):
    """Return the same with stages that start at these blocks, each with its own module and only its weights."""
    parts, owned, outputs, before = [], {}, [], frozenset()
    for first, last in pairwise((*firsts, len(chain.blocks))):
        stage, holds = deepcopy(module), chain.holds(first, last)
        keep_stage(stage, holds, CPU)
        parts.append((chain.part(first, last), stage, chain.interception(stage, CPU)))
        owned[len(parts) - 1] = holds - before
        before |= holds
    for mode, seed in BATCHES:
        values, inputs = [], batch(seed)
        for part, stage, interception in parts:
            with interception.installed(), in_mode(stage, training=mode == "train"):
                values = interception.run(part, values, partial(stage, inputs))
        outputs.append(values)
    buffers = [(number, dict(stage.named_buffers())) for number, (_, stage, _) in enumerate(parts)]
    return outputs, {name: held[name] for number, held in buffers for name in held if name in owned[number]}


def assert_each_cut_computes_what_the_whole_does(module, chain):
    cuts = range(1, len(chain.blocks))
    expected, buffers = in_one(deepcopy(module))
    for firsts in [*([0, cut] for cut in cuts), [0, *cuts]]:
        found, held = in_stages(module, chain, firsts)
        assert all(map(torch.equal, found, expected))
        assert held.keys() == buffers.keys()
        assert all(torch.equal(held[name], buffer) for name, buffer in buffers.items())


def evaluation(module):
    def run():
        with in_mode(module, training=False):
            return module(batch(9))

    return run


CHOICES = st.tuples(
    st.integers(0, 3),
    st.sampled_from(Chooser.SOURCES),
    st.sampled_from(sorted(WAYS)),
    st.sampled_from(["train", "evaluate", None]),
)


@given(
    st.lists(CHOICES, max_size=3),
    st.integers(0, 4),
    st.sampled_from(Chooser.COUNTED),
    st.sampled_from(Chooser.HOW),
    st.integers(0, 9),
)
@example([(0, "seen", "bool", None)], 4, "in place", "plain", 0)
@example([(0, "seen", "bool", None)], 4, "assigned", "in place", 0)
@example([(3, "block", "int", "train")], 0, "assigned", "assigned", 1)
@example([], 2, "from values", "attribute", 2)
@torch.no_grad()
def test_stages_compute_what_the_whole_does_wherever_it_is_cut(choices, counted_before, counted, how, seed):
    torch.manual_seed(seed)
    module = Chooser(choices, counted_before, counted, how)
    chain = find_chain(module, lambda: module(batch(9)), 1, CPU, list(module.layers), 1, evaluation(module))
    assert_each_cut_computes_what_the_whole_does(module, chain)


def blocks_of(choices, *others):
    module = Chooser(choices, *others)
    chain = find_chain(module, lambda: module(batch(9)), 1, CPU, list(module.layers), 1, evaluation(module))
    return [block.name for block in chain.blocks]


@pytest.mark.parametrize("way", WAYS)
def test_values_are_used_on_one_stage_unless_all_have_them(way):
    second_to_last = ["layers.0", "layers.1 + layers.2 + layers.3"]
    after_the_second = ["layers.0", "layers.1", "layers.2 + layers.3"]
    assert blocks_of([(1, "value", way, None)]) == after_the_second
    assert blocks_of([(1, "value", way, "train")]) == after_the_second, "which is the mode in that it is not asked"
    assert blocks_of([(2, "block", way, None)]) == second_to_last
    assert blocks_of([(0, "seen", way, None)], 0, "in place", "returned") == second_to_last
    assert blocks_of([(0, "seen", way, None)], 0, "in place", "attribute") == second_to_last
    assert len(blocks_of([(1, "seen", way, None), (1, "weight", way, None)])) == 4


def test_a_number_that_a_module_counts_and_returns_stays_with_it():
    assert blocks_of([], 0, "in place", "calls returned") == ["layers.0", "layers.1 + layers.2 + layers.3"]


class Normed(nn.Module):
    """Uses the running mean of its second layer after the third one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))
        self.layers[1] = nn.BatchNorm1d(3).double()

    def forward(self, value):
        for number, layer in enumerate(self.layers):
            value = layer(value)
            if number == 2:
                value = value - self.layers[1].running_mean
        return value


@torch.no_grad()
def test_a_buffer_that_an_operation_changes_without_telling_is_used_where_it_is_changed():
    module = Normed()
    chain = find_chain(module, lambda: module(batch(9)), 1, CPU, list(module.layers), 1, evaluation(module))
    assert [block.name for block in chain.blocks] == ["layers.0", "layers.1 + layers.2", "layers.3"]
    assert_each_cut_computes_what_the_whole_does(module, chain)


class Evaluated(nn.Module):
    """Skips its second layer in validation, or bypasses its third one."""

    def __init__(self, difference):
        super().__init__()
        self.layers, self.difference = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(5)), difference

    def forward(self, value):
        different = not self.training
        for number, layer in enumerate(self.layers):
            if not (different and self.difference == "leaves out" and number == 1):
                before, value = value, layer(value)
            if different and self.difference == "goes around" and number == 2:
                value = value + before
        return value


@pytest.mark.parametrize(
    ("difference", "blocks"),
    [
        ("leaves out", ["layers.0", "layers.1 + layers.2", "layers.3", "layers.4"]),
        ("goes around", ["layers.0", "layers.1", "layers.2 + layers.3", "layers.4"]),
    ],
)
@torch.no_grad()
def test_where_validation_computes_something_else_it_is_not_cut(difference, blocks):
    module = Evaluated(difference)
    chain = find_chain(module, lambda: module(batch(9)), 1, CPU, list(module.layers), 1, evaluation(module))
    assert [block.name for block in chain.blocks] == blocks
    assert_each_cut_computes_what_the_whole_does(module, chain)


@pytest.mark.parametrize("counted", Chooser.COUNTED)
@pytest.mark.parametrize("how", Chooser.HOW)
@torch.no_grad()
def test_finding_blocks_counts_nothing(how, counted):
    module = Chooser([(0, "seen", "int", None)], 0, counted, how)
    before, buffers = deepcopy(module), dict(module.named_buffers())
    find_chain(module, lambda: module(batch(9)), 1, CPU, list(module.layers), 1, evaluation(module))
    assert all(buffer is buffers[name] for name, buffer in module.named_buffers())
    assert all(map(torch.equal, in_one(module)[0], in_one(before)[0]))


class Late(nn.Module):
    """Only reads its fifth batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.batches = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), 0

    def forward(self, value):
        self.batches += 1
        value = self.first(value)
        if self.batches == 5:
            value = value * float(value.sum())
        return self.second(value)


@torch.no_grad()
def test_values_that_are_taken_out_later_on_are_refused_with_what_does_it():
    module = Late()
    chain = find_chain(module, lambda: module(batch(9)), 2, CPU)
    with pytest.raises(MisconfigurationError, match=r"first, or the code after it, reads values of .*\(__float__\)"):
        in_stages(module, chain, [0, 1])


class Rare(Module):
    """Trains a layer's weight only after the first step, and counts steps itself."""

    def __init__(self, optimizer, batch_size=8):
        super().__init__()
        torch.manual_seed(3)
        self.optimizer, self.batch_size = optimizer, batch_size
        self.first, self.count, self.layer, self.head = nn.Linear(3, 3), WeightsSeen(), nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, value):
        value = self.norm(self.first(value))
        frozen = self.count(self.head.bias) <= 1
        weight = self.layer.weight.detach() if frozen else self.layer.weight
        return self.head(nn.functional.linear(value, weight, self.layer.bias))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        value = self.first(batch[0])
        share = float((value > 0).double().mean())
        return {"mse": share * nn.functional.mse_loss(self.head(self.norm(value)), batch[1])}

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

    def train_dataloader(self):
        inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=self.batch_size)

    val_dataloader = train_dataloader


class WeightsSeen(nn.Module):
    """Counts trained weights by those of a layer on another stage."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("latest", torch.zeros(3))

    @torch.no_grad()
    def forward(self, bias):
        if self.training:
            self.seen += (bias != self.latest).any()
            self.latest = bias.clone()
        return int(self.seen)


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam])
def test_ranks_train_what_one_device_does(optimizer):
    many, one = Rare(optimizer), Rare(optimizer, batch_size=2)
    options = {"accelerator": "cpu", "precision": 64, "max_epochs": 2}
    trainer = Trainer(gpus=2, distributed_backend="balanced", micro_batches=4, accumulate_grad_batches=2, **options)
    trainer.fit(many)
    reference = Trainer(accumulate_grad_batches=8, **options)
    reference.fit(one)
    for (name, found), expected in zip(many.state_dict().items(), one.state_dict().values(), strict=True):
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max().clamp_min(1)), name
    assert trainer.metrics["loss"] == pytest.approx(reference.metrics["loss"], rel=1e-12)
    assert trainer.metrics["mse"] == pytest.approx(mean_of_whole_batches(many), rel=1e-12)


def test_a_module_of_which_too_little_is_left_to_part_is_refused_with_all_that_takes_values():
    trainer = Trainer(gpus=3, distributed_backend="balanced", accelerator="cpu")
    reasons = r"in validation, first or the code after it reads .*\(__float__\); count or .* reads .*\(__int__\)"
    with pytest.raises(MisconfigurationError, match=reasons):
        trainer.plan_stages(Rare(torch.optim.Adam))


def mean_of_whole_batches(module):
    """Return the trained module's metric, whose batches are larger than one device's here."""
    with in_mode(module, training=False), torch.no_grad():
        batches = [(one.double(), other.double()) for one, other in module.val_dataloader()]
        return float(torch.stack([module.validation_step(batch, 0)["mse"] for batch in batches]).mean())
