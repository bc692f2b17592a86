"""Simulated DataParallel: several devices compute the same as one."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from plumbline.trainer.nested import gather, scatter
from plumbline.trainer.strategies import Replicas

Pair = namedtuple("Pair", "left right")


def gradients(module):
    return {name: weight.grad for name, weight in module.named_parameters()}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.double()

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0] * self.frozen)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_gradients_are_those_of_one_device(count):
    tokens = torch.randint(6, (11, 3), generator=torch.Generator().manual_seed(1))
    one, many = Tied(), Tied()
    outputs = [one(tokens), Replicas(many, count)(tokens)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.allclose(*outputs, rtol=1e-14)
    for name, gradient in gradients(one).items():
        if gradient is None:
            assert gradients(many)[name] is None, "an unused weight has no gradient, rather than zeros"
        else:
            assert torch.allclose(gradient, gradients(many)[name], rtol=1e-13, atol=1e-14), name
    assert isinstance(many.head.weight, nn.Parameter)
    assert many.head.weight is many.embed.weight


def test_buffers_are_those_of_the_first_device():
    inputs = torch.randn(9, 4, dtype=torch.float64)
    one, many = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    outputs = Replicas(many, 2)(inputs)
    expected = one(inputs[:5])
    assert torch.equal(outputs[:5], expected)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), many.buffers(), strict=True))
    assert many.num_batches_tracked == 1
    assert torch.allclose(outputs[5:], nn.BatchNorm1d(4).double()(inputs[5:]))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        self.seen += 1
        return inputs * self.seen * self.weight


def test_every_replica_begins_with_the_same_buffers():
    many = Replicas(Counting(), 3)
    assert torch.equal(many(torch.ones(6, 2)), torch.ones(6, 2))
    assert torch.equal(many(torch.ones(6, 2)), 2 * torch.ones(6, 2))


@pytest.mark.parametrize(
    ("batch", "calls"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (5, [2, 2, 1]), (2, [1, 1]), (1, [1])]
)
def test_a_hook_fires_once_a_replica_and_a_short_batch_uses_fewer(batch, calls):
    module, seen = nn.Linear(3, 2), []
    module.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    assert Replicas(module, 4)(torch.ones(batch, 3)).shape == (batch, 2)
    assert seen == calls == [len(chunk) for chunk in torch.ones(batch).chunk(4)]


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(3, 2)
        self.hooked = nn.Linear(2, 2)
        self.hooked.register_forward_hook(lambda layer, _, output: setattr(layer, "last", output))
        self.behind = nn.Linear(2, 2)
        self.behind.register_full_backward_hook(lambda layer, *_: setattr(layer, "last", True))
        self.last = None

    def forward(self, inputs):
        assert self.last is None
        self.last = self.behind(self.hooked(self.plain(inputs)))
        return self.last


def test_what_a_forward_or_a_hook_assigns_is_lost_with_its_replica():
    module = Remembering()
    for _ in range(2):
        Replicas(module, 2)(torch.ones(4, 3)).sum().backward()
    assert module.last is None
    assert not hasattr(module.hooked, "last")
    assert not hasattr(module.behind, "last")
    assert module.plain.weight.grad is not None


class Exchanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        self.layer = nn.Identity()
        assert self.layer is self._modules["layer"]
        return self.layer(outputs)


def test_a_layer_that_a_forward_exchanges_is_the_modules_own_again():
    module = Exchanging()
    for _ in range(2):
        assert Replicas(module, 2)(torch.ones(4, 3)).shape == (4, 2)
    assert isinstance(module.layer, nn.Linear)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", range(12))
def test_a_batch_falls_into_as_many_chunks_as_torch_makes_of_it(length, count):
    values = torch.arange(length)
    chunks = [part for part, _ in scatter((values, "text"), count)]
    assert [part.tolist() for part in chunks] == [part.tolist() for part in values.chunk(count)]


def test_no_gradients_are_kept_without_grad_mode():
    with torch.no_grad():
        assert not Replicas(nn.Linear(3, 2), 2)(torch.ones(4, 3)).requires_grad


def test_nested_batches_come_back_as_they_went():
    batch = {
        "a": torch.arange(7),
        "b": [torch.arange(14).view(7, 2), "text"],
        "c": Pair(torch.tensor(3.0), None),
        "d": (),
    }
    parts = scatter(batch, 3)
    assert [len(part["a"]) for part in parts] == [3, 3, 1]
    assert all(part["c"] == Pair(torch.tensor(3.0), None) and part["d"] == () for part in parts)
    joined = gather(parts)
    assert torch.equal(joined["a"], batch["a"])
    assert torch.equal(joined["b"][0], batch["b"][0])
    assert joined["b"][1] == "text"
    assert isinstance(joined["c"], Pair)
    assert joined["c"].left.tolist() == [3.0, 3.0, 3.0]
    assert gather([1.5, 2.5]) == [1.5, 2.5]


def test_a_scalar_of_each_replica_becomes_a_vector():
    assert gather([torch.tensor(1.0)]).tolist() == [1.0]
    assert gather([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]


def test_a_batch_without_tensors_goes_to_one_replica():
    assert scatter(("text", 3), 4) == [("text", 3)]


def test_tensors_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="numbers of chunks, 2 and 3, over 3 devices"):
        scatter({"a": torch.ones(6), "b": torch.ones(2)}, 3)


@pytest.mark.cuda(devices=2)  # torch's DataParallel needs them
def test_like_torchs_data_parallel():
    inputs = torch.randn(11, 5, dtype=torch.float64)
    simulated = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    real = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    real.load_state_dict(simulated.state_dict())
    real.cuda()
    Replicas(simulated, 2)(inputs).square().sum().backward()
    nn.DataParallel(real, device_ids=[0, 1])(inputs.cuda()).square().sum().backward()
    for name, gradient in gradients(simulated).items():
        assert torch.allclose(gradient, gradients(real)[name].cpu()), name
    assert torch.allclose(simulated[1].running_mean, real[1].running_mean.cpu())
