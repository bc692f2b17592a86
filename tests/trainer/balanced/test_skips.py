"""Modules whose blocks use more than the previous block's output can be divided, and train like on one device."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plumbline.trainer import Module, Trainer
from plumbline.trainer.balanced.chain import find_chain
from plumbline.trainer.balanced.pipeline import note_gradient
from plumbline.trainer.balanced.planning import measure_chain

CPU = torch.device("cpu")


def layers(count, width=4):
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class UNet(nn.Module):
    """Each decoder uses the output of the encoder of its resolution."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 4, 3, padding=1)])
        self.middle = nn.Conv1d(4, 4, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv1d(8, 2, 3, padding=1), nn.Conv1d(4, 1, 3, padding=1)])

    def forward(self, inputs):
        value, features = inputs.unsqueeze(1), []
        for layer in self.down:
            features.append(torch.relu(layer(value)))
            value = nn.functional.avg_pool1d(features[-1], 2)
        value = torch.tanh(self.middle(value))
        for layer in self.up:
            value = nn.functional.interpolate(value, scale_factor=2)
            value = layer(torch.cat([value, features.pop()], 1))
        return value.squeeze(1)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden, memory, mask=None):
        scores = self.query(hidden) @ memory.transpose(1, 2)
        scores = scores if mask is None else scores.masked_fill(mask, -1e4)
        return hidden + self.out(scores.softmax(-1) @ memory)


class EncoderDecoder(nn.Module):
    """Each layer of the decoder uses the encoder's output."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Attending() for _ in range(2))
        self.decoder = nn.ModuleList(Attending() for _ in range(3))
        self.enter, self.begin = nn.Linear(1, 4), nn.Linear(1, 4)

    def forward(self, inputs):
        memory = self.enter(inputs.unsqueeze(2))
        for layer in self.encoder:
            memory = layer(memory, memory)
        value = self.begin(inputs.flip(1).unsqueeze(2))
        for layer in self.decoder:
            value = layer(value, memory)
        return value.mean(2)


class Dense(nn.Module):
    """Each layer uses the outputs of all layers before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * (1 + number), 4) for number in range(5))

    def forward(self, inputs):
        features = [inputs]
        for layer in self.layers:
            features.append(torch.relu(layer(torch.cat(features, 1))))
        return features[-1]


class Masked(nn.Module):
    """Each layer uses a mask, without a gradient, and a table, with one, from the first modules."""

    def __init__(self):
        super().__init__()
        self.embedding, self.table = nn.Linear(1, 4), nn.Linear(4, 4)
        self.hide = Hiding()
        self.layers = nn.ModuleList(Attending() for _ in range(4))

    def forward(self, inputs):
        value = self.embedding(inputs.unsqueeze(2))
        table, mask = self.table(value).tanh(), self.hide(value)
        for layer in self.layers:
            value = layer(value * table, value, mask)
        return value.mean(2)


class Hiding(nn.Module):
    def forward(self, value):
        return value.detach().mean(2, keepdim=True) > 0.5


class ThreeTimes(nn.Module):
    """All other layers use the first one's output, and only the last one uses a part of it."""

    def __init__(self):
        super().__init__()
        self.layers = layers(5)

    def forward(self, inputs):
        first = self.layers[0](inputs)
        left, right = first.chunk(2, 1)
        value = first
        for layer in self.layers[1:]:
            value = torch.tanh(layer(value)) + first * left.sum(1, keepdim=True)
        return value + right.repeat(1, 2)


class InPlace(nn.Module):
    """Residual connections by +=, a changed view, an identity, and an in-place activation."""

    def __init__(self):
        super().__init__()
        self.layers, self.act, self.same = layers(4), nn.ReLU(inplace=True), nn.Identity()

    def forward(self, inputs):
        value = self.layers[0](inputs)
        kept = self.same(value)
        value = self.layers[1](value).sin()
        value += kept
        value[:, 1:] *= 2
        value = self.act(self.layers[2](value)) + kept
        return self.layers[3](value) + value


class Noisy(nn.Module):
    """Uses a random draw from the start both at the start and at the end, like diffusion models."""

    def __init__(self):
        super().__init__()
        self.layers = layers(4)

    def forward(self, inputs):
        noise = torch.randn_like(inputs) + 0
        value = inputs + noise
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value - noise


class TwoHeads(nn.Module):
    """A layer in the middle has its own head."""

    def __init__(self):
        super().__init__()
        self.layers, self.early, self.late = layers(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        value, outputs = inputs, []
        for number, layer in enumerate(self.layers):
            value = torch.tanh(layer(value))
            if number == 1:
                outputs.append(self.early(value))
        return 0.3 * outputs[0] + self.late(value)


class Watched(TwoHeads):
    """The middle head is not part of the loss: its weights have no gradient, so they do not decay."""

    def forward(self, inputs):
        value = inputs
        for number, layer in enumerate(self.layers):
            value = torch.tanh(layer(value))
            if number == 1:
                seen = self.early(value)
        return self.late(value) + 0.1 * seen.detach()


MODELS = {
    UNet: 5, EncoderDecoder: 7, Dense: 5, Masked: 7, ThreeTimes: 5, InPlace: 6, Noisy: 4, TwoHeads: 6, Watched: 6,
}  # fmt: skip
"""With the number of each model's blocks, which is that of its module calls."""


def whole_gradients(module, batch):
    module.zero_grad()
    torch.manual_seed(0)
    loss = module(batch).square().sum()
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in module.named_parameters()}


def gradients_in_stages(module, chain, batch, firsts):
    """Run forward and backward of stages that start at these blocks, in this process."""
    module.zero_grad()
    interception, runs, values = chain.interception(module, CPU), [], []
    with interception.installed():
        for first, last in pairwise((*firsts, len(chain.blocks))):
            part = chain.part(first, last)
            noted = [None] * len(values)
            sent = [value.detach().clone() for value in values]
            inputs = [
                note_gradient(tensor, noted, index) if carried.differentiable else tensor
                for index, (tensor, carried) in enumerate(zip(sent, part.arriving, strict=True))
            ]
            torch.manual_seed(len(runs))
            outputs = interception.run(part, inputs, lambda: module(batch))
            values = outputs if last < len(chain.blocks) else [outputs.square().sum()]
            runs.append((part, noted, values))
    loss, received = values[0].detach(), [torch.ones_like(values[0])]
    for part, noted, departed in reversed(runs):
        if part.departing:
            departed = [value for value, one in zip(departed, part.departing, strict=True) if one.differentiable]
        pairs = [pair for pair in zip(departed, received, strict=True) if pair[0].requires_grad and pair[1] is not None]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        received = [gradient for gradient, one in zip(noted, part.arriving, strict=True) if one.differentiable]
    return loss, {name: weight.grad for name, weight in module.named_parameters()}


def find_profile(module, batch):
    chain = find_chain(module, lambda: module(batch), 2, CPU)
    return measure_chain(module, chain, module, batch, [1], device=CPU, optimizers=[])[1]


def ways_to_cut(blocks):
    """Return each single cut, and all cuts together."""
    return [*([0, cut] for cut in range(1, blocks)), list(range(blocks))]


def assert_alike(found, expected, exact=False):
    (loss, gradients), (whole_loss, whole) = found, expected
    bound = 0 if exact else 1e-12
    assert float((loss - whole_loss).abs()) <= bound * float(whole_loss.abs())
    for name, gradient in whole.items():
        if gradient is None:
            assert gradients[name] is None or not gradients[name].any(), name
        else:
            assert float((gradients[name] - gradient).abs().max()) <= bound * float(gradient.abs().max()), name


@pytest.mark.parametrize("kind", MODELS)
def test_each_cut_gives_the_gradients_of_the_whole(kind):
    torch.manual_seed(3)
    module, batch = kind().double(), torch.randn(6, 4, dtype=torch.float64)
    expected = whole_gradients(module, batch)
    chain = find_chain(module, lambda: module(batch), 2, CPU)
    assert len(chain.blocks) == MODELS[kind]
    for firsts in ways_to_cut(len(chain.blocks)):
        assert_alike(gradients_in_stages(module, chain, batch, firsts), expected)


class Program(nn.Module):
    """Small layers and operations on earlier values, in any order; all numbers are integers, so sums are exact."""

    OPERATIONS = ("layer", "add", "cat", "view", "identity", "add in place", "fill", "relu in place", "mask", "rows")

    def __init__(self, instructions, used, generator):
        super().__init__()
        self.instructions, self.used = instructions, used
        self.same, self.relu = nn.Identity(), nn.ReLU(inplace=True)
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in instructions)
        for weight in self.layers.parameters():
            weight.data = torch.randint(-2, 3, weight.shape, generator=generator).double()

    def forward(self, inputs):
        values = [self.layers[0](inputs)]
        for (operation, one, other), layer in zip(self.instructions, self.layers, strict=True):
            left, right = values[one % len(values)], values[other % len(values)]
            match operation:
                case "layer":
                    values.append(layer(left))
                case "add":
                    values.append(left + right)
                case "cat":
                    values.append(torch.cat([left, right], 1)[:, 1:4])
                case "view":
                    values.append(left.view(3, -1).view(-1, 3))
                case "identity":
                    values.append(self.same(left))
                case "add in place":
                    left += right
                case "fill":
                    left[:, 0] = right[:, 1]
                case "relu in place":
                    values.append(self.relu(left))
                case "mask":
                    values.append(left * (right > 1))
                case "rows":
                    rows = torch.zeros(2, 3, dtype=torch.float64)
                    rows[0] = layer(left)[0]
                    rows[1] = right[1]
                    values.append(rows)
        return torch.stack([values[number % len(values)] for number in self.used]).sum(0)


instructions = st.lists(
    st.tuples(st.sampled_from(Program.OPERATIONS), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9
)


@settings(max_examples=50, deadline=None)
@given(instructions, st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 2**31))
def test_any_program_gives_the_gradients_of_the_whole_at_each_cut(program, used, seed):
    generator = torch.Generator().manual_seed(seed)
    module = Program(program, used, generator)
    batch = torch.randint(-2, 3, (2, 3), generator=generator).double()
    try:
        expected = whole_gradients(module, batch)
    except RuntimeError:  # a value that the backward needs was changed in place
        assume(False)
    chain = find_chain(module, lambda: module(batch), 1, CPU, [*module.layers, module.same, module.relu])
    for firsts in ways_to_cut(len(chain.blocks)):
        assert_alike(gradients_in_stages(module, chain, batch, firsts), expected, exact=True)


class Task(Module):
    """Two batches of 8 samples, and two more of them in validation."""

    def __init__(self, kind, batch_size=8):
        super().__init__()
        torch.manual_seed(3)
        self.net, self.batch_size = kind(), batch_size

    def data(self):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return TensorDataset(inputs, inputs.roll(1, 1))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch, batch_idx):
        return {"mse": self.training_step(batch, batch_idx)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def train_dataloader(self):
        return DataLoader(self.data(), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data(), batch_size=8)


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        (UNet, 2),
        (UNet, 3),
        (EncoderDecoder, 3),
        (Dense, 3),
        (Masked, 2),
        (ThreeTimes, 3),
        (InPlace, 3),
        (Watched, 2),
        (TwoHeads, 2),
    ],
)
def test_ranks_train_what_one_device_does(kind, devices):
    many, one = Task(kind), Task(kind, batch_size=2)
    options = {"accelerator": "cpu", "precision": 64, "max_epochs": 1}
    trainer = Trainer(gpus=devices, distributed_backend="balanced", micro_batches=4, **options)
    trainer.fit(many)
    reference = Trainer(accumulate_grad_batches=4, **options)
    reference.fit(one)
    for (name, found), expected in zip(many.state_dict().items(), one.state_dict().values(), strict=True):
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max().clamp_min(1)), name
    assert trainer.metrics == pytest.approx(reference.metrics, rel=1e-12)
    assert len(trainer.balance.plan.blocks) == MODELS[kind]


def test_what_crosses_a_cut_is_counted_with_what_only_passes_through(plan):
    module, batch = UNet(), torch.randn(6, 4)
    found = plan(module, batch, 2, counts=[1])
    first, second = 6 * 2 * 4 * 4, 6 * 4 * 2 * 4  # bytes of the encoders' features, of lengths 4 and 2
    middle, decoded = 6 * 4 * 1 * 4, 6 * 2 * 2 * 4
    # The smallest transfers are features before pooling, and decoders' inputs before they are enlarged and joined.
    assert [block.output_bytes for block in found.blocks] == [
        first,
        first + second,
        first + second + middle,
        first + decoded,
        6 * 4 * 4,
    ]
    passing = next(one for one in find_profile(module, batch).travelling if one.enters == [2, 3, 4])
    assert (passing.bytes, passing.leaves) == (first, [1, 2, 3])
