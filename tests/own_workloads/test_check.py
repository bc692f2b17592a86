"""A wrong workload is refused for its own mistake before training starts; the built-in ones are not."""

from __future__ import annotations

import pytest

from plumbline.core.errors import WorkloadError
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import use_workloads
from plumbline.workloads import WORKLOADS

pytestmark = pytest.mark.usefixtures("one_thread")  # the tensors are small

DEVICES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_built_in_workload_is_fit(name):
    refuse_unfit(WORKLOADS[name], DEVICES)


FORWARD = 'return self.layers(batch["x"])'

CHANGED = {
    "a forward that returns no tensor": (
        [(FORWARD, "return None")],
        "forward(batch) returned NoneType: return a tensor",
    ),
    "a forward that returns a number too": (
        [(FORWARD, f"{FORWARD}, 1")],
        "forward(batch) returned tuple: return a tensor",
    ),
    "a forward without the batch in dim 0": ([(FORWARD, f"{FORWARD}.T")], "dim 0 must be the batch"),
    "a forward that raises": ([(FORWARD, 'return self.layers(batch["z"])')], "forward(batch) raises KeyError: 'z'"),
    "dropout": (
        [("nn.Tanh()", "nn.Dropout(0.5)")],
        "plumbline.workloads.randomness.KeyedDropout, whose masks depend only on the samples",
    ),
    "a forward that counts its calls": (
        [(FORWARD, "self.calls = getattr(self, 'calls', 0) + 1\n        return self.layers(batch['x']) * self.calls")],
        "forward(batch) returned different outputs in two calls",
    ),
    "a forward in float32 where all is float64": (
        [(FORWARD, 'return self.layers[2](self.layers[:2](batch["x"]).float().to(batch["x"].dtype))')],
        "in float64, the precision of the oracle, float() converts float64 to float32",
    ),
    "a forward that cannot be in float64": (
        [(FORWARD, 'return self.layers(batch["x"].float())')],
        "in float64, the precision of the oracle",
    ),
    "a parameter that is never used": (
        [("super().__init__()", "super().__init__()\n        self.spare = nn.Linear(2, 2)")],
        "parameter spare.weight never gets a gradient",
    ),
    "a parameter that few batches use": (
        [
            ("super().__init__()", "super().__init__()\n        self.rare = nn.Linear(5, 3)"),
            (
                FORWARD,
                'return self.layers(batch["x"]) + (self.rare(batch["x"]) if 0 in batch["index"] else 0)',
            ),
        ],
        "parameter rare.weight gets a gradient in 1 of 3 batches",
    ),
    "weights at random": (
        [("return Model()", "torch.default_generator.seed()\n        return Model()")],
        "layers.0.weight differs between two calls with the same seed: build() is not deterministic",
    ),
    "data at random": (
        [("torch.randn(count, 5, generator=generator)", "torch.randn(count, 5)")],
        "x differs between two calls with the same seed: dataset(1) is not deterministic",
    ),
    "no parameter": (
        [("return Model()", "return Model().requires_grad_(False)")],
        "build() returned a model without trainable parameters",
    ),
    "no model": ([("return Model()", "return Model().layers[0].weight")], "return a torch.nn.Module"),
    "too few rows in a column": (
        [("torch.randint(3, (count,)", "torch.randint(3, (count - 1,)")],
        "column 'y' has 71 rows for 72 samples",
    ),
    "a column of strings": (
        [('"y": torch', '"z": ["word"] * count,\n            "y": torch')],
        "columns() returned list as 'z': return a tensor with a row for each sample",
    ),
    "BatchNorm over one sample": (
        [("nn.Tanh()", "nn.BatchNorm1d(6)"), ('exposes = "something"', 'exposes = "something"\n    batch_size = 4')],
        "with 4 devices, each gets 1 of the samples of a batch, and then forward(batch) raises ValueError",
    ),
}

ADDED = {
    "less than a global batch": (
        "def samples(self, devices):\n    return 20",
        "dataset(1) has 20 samples, fewer than the 24 of one global batch",
    ),
    "fewer batches than it says": ("def samples(self, devices):\n    return 30", "steps_per_epoch is 3"),
    "a dataset of another kind": (
        "def dataset(self, devices, dtype=torch.float32):\n    return [{'x': torch.zeros(5)}] * 72",
        'a row for each sample, whose "index" shows which samples a rank uses',
    ),
    "an index that does not count": (
        "def dataset(self, devices, dtype=torch.float32):\n"
        "    data = super().dataset(devices, dtype)\n"
        "    data.columns['index'] += 1\n"
        "    return data",
        'the "index" of dataset() must count the samples from 0',
    ),
    "no index": (
        "def dataset(self, devices, dtype=torch.float32):\n"
        "    data = super().dataset(devices, dtype)\n"
        "    del data.columns['index']\n"
        "    data.__class__ = type('Short', (type(data),), {'__len__': lambda self: 72})\n"
        "    return data",
        'the "index" of dataset() must count',
    ),
    "a loss for each sample": (
        "def loss(self, outputs, batch):\n    return outputs.sum(1)",
        "loss(outputs, batch) returned a tensor of shape [24]: return a scalar tensor",
    ),
    "a loss that is a number": (
        "def loss(self, outputs, batch):\n    return outputs.mean().item()",
        "loss(outputs, batch) returned float",
    ),
    "a loss that does not depend on the outputs": (
        "def loss(self, outputs, batch):\n    return outputs.detach().mean()",
        "not differentiable with respect to the outputs",
    ),
    "a loss at random": (
        "def loss(self, outputs, batch):\n    return outputs.mean() * torch.rand(())",
        "returned different values in two calls",
    ),
    "a loss that is not finite": (
        "def loss(self, outputs, batch):\n    return outputs.mean() / 0",
        "inf at the initial weights: return a finite loss",
    ),
    "a loss that depends on the order": (
        "def loss(self, outputs, batch):\n    return (outputs[:, 0] * torch.arange(len(outputs))).mean()",
        "The loss must not depend on the order of the samples",
    ),
    "a learning rate that is not exact": ("exact = True", "exact is True, but training in float32 and float64"),
    "a capability that is not named": ("accumulate = 3", 'add "accumulation" to needs'),
    "clipping that is not named": ("clip_norm = 1.0", 'add "clipping" to needs'),
    "a capability that is none": ("needs = frozenset({'acumulation'})", "unknown capability 'acumulation'"),
    "no batch": ("batch_size = 0", "batch_size must be an integer of 1 or more, not 0"),
    "a precision that is none": ("precisions = ('fp32',)", "unknown precision 'fp32'"),
    "a batch that devices cannot share": (
        "def global_batch_size(self, devices):\n    return 24 + devices % 2\n\n"
        "def samples(self, devices):\n    return 72",
        "global_batch_size(3) is 25, which is not divisible by 3",
    ),
    "half of the parameters": (
        "def optimizer(self, params):\n    return torch.optim.SGD([*params][:2], lr=0.1)",
        "parameter layers.2.weight is in 0 optimizers",
    ),
    "no optimizer": ("def optimizer(self, params):\n    return None", "returned NoneType"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_it_is_refused_for_its_model_or_data(what, written):
    changes, said = CHANGED[what]
    assert said in refused(written(changes=changes))


@pytest.mark.parametrize("what", ADDED)
def test_it_is_refused_for_its_loss_or_its_numbers(what, written):
    more, said = ADDED[what]
    assert said in refused(written(more=more))


def refused(file):
    use_workloads([str(file)])
    with pytest.raises(WorkloadError) as raised:
        refuse_unfit(WORKLOADS["mine"], DEVICES)
    return str(raised.value)
