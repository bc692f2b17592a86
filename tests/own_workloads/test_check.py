"""By what is wrong with it, a workload is refused before anything is trained; the built-in ones are not."""

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
    "a forward that returns no tensor": ([(FORWARD, "return None")], "forward(batch) returns NoneType: it must return"),
    "a forward that returns a number too": (
        [(FORWARD, f"{FORWARD}, 1")],
        "forward(batch) returns tuple: it must return a tensor",
    ),
    "a forward without the batch in dim 0": ([(FORWARD, f"{FORWARD}.T")], "dim 0 must be the batch"),
    "a forward that raises": ([(FORWARD, 'return self.layers(batch["z"])')], "forward(batch) raises KeyError: 'z'"),
    "dropout": ([("nn.Tanh()", "nn.Dropout(0.5)")], "Set p=0, or use plumbline.workloads.randomness.KeyedDropout"),
    "a forward that counts its calls": (
        [(FORWARD, "self.calls = getattr(self, 'calls', 0) + 1\n        return self.layers(batch['x']) * self.calls")],
        "forward(batch) returns something else in a second call",
    ),
    "a forward in float32 where all is float64": (
        [(FORWARD, 'return self.layers[2](self.layers[:2](batch["x"]).float().to(batch["x"].dtype))')],
        "in float64, in which the oracle computes, float() makes float32 of float64",
    ),
    "a forward that cannot be in float64": (
        [(FORWARD, 'return self.layers(batch["x"].float())')],
        "in float64, in which the oracle computes",
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
        "layers.0.weight differs between two calls with one seed: build() is not deterministic",
    ),
    "data at random": (
        [("torch.randn(count, 5, generator=generator)", "torch.randn(count, 5)")],
        "x differs between two calls with one seed: dataset(1) is not deterministic",
    ),
    "no parameter": (
        [("return Model()", "return Model().requires_grad_(False)")],
        "build() returns a model without a parameter to train",
    ),
    "no model": ([("return Model()", "return Model().layers[0].weight")], "must be a torch.nn.Module"),
    "too few rows in a column": (
        [("torch.randint(3, (count,)", "torch.randint(3, (count - 1,)")],
        "column 'y' has 71 rows, and 72 samples need a row each",
    ),
    "a column of strings": (
        [('"y": torch', '"z": ["word"] * count,\n            "y": torch')],
        "columns() returns list as 'z': it must be a tensor with a row for each sample",
    ),
    "BatchNorm over one sample": (
        [("nn.Tanh()", "nn.BatchNorm1d(6)"), ('exposes = "something"', 'exposes = "something"\n    batch_size = 4')],
        "each of 4 devices has 1 samples of a batch, and with so few forward(batch) raises ValueError",
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
        'a row for each sample, whose "index" tells which samples a rank uses',
    ),
    "an index that does not count": (
        "def dataset(self, devices, dtype=torch.float32):\n"
        "    data = super().dataset(devices, dtype)\n"
        "    data.columns['index'] += 1\n"
        "    return data",
        'has no "index" that counts its samples from 0',
    ),
    "no index": (
        "def dataset(self, devices, dtype=torch.float32):\n"
        "    data = super().dataset(devices, dtype)\n"
        "    del data.columns['index']\n"
        "    data.__class__ = type('Short', (type(data),), {'__len__': lambda self: 72})\n"
        "    return data",
        'has no "index"',
    ),
    "a loss for each sample": (
        "def loss(self, outputs, batch):\n    return outputs.sum(1)",
        "loss(outputs, batch) returns a tensor of shape [24]: it must be a scalar tensor",
    ),
    "a loss that is a number": (
        "def loss(self, outputs, batch):\n    return outputs.mean().item()",
        "loss(outputs, batch) returns float",
    ),
    "a loss that does not depend on the outputs": (
        "def loss(self, outputs, batch):\n    return outputs.detach().mean()",
        "no differentiable function of the outputs",
    ),
    "a loss at random": (
        "def loss(self, outputs, batch):\n    return outputs.mean() * torch.rand(())",
        "returns another number in a second call",
    ),
    "a loss that is not finite": (
        "def loss(self, outputs, batch):\n    return outputs.mean() / 0",
        "inf at the initial weights",
    ),
    "a loss that depends on the order": (
        "def loss(self, outputs, batch):\n    return (outputs[:, 0] * torch.arange(len(outputs))).mean()",
        "Does the loss depend on the order of the samples",
    ),
    "a learning rate that is not exact": ("exact = True", "exact is True, and after training in float32"),
    "a capability that is not named": ("accumulate = 3", 'needs does not name "accumulation"'),
    "clipping that is not named": ("clip_norm = 1.0", 'needs does not name "clipping"'),
    "a capability that is none": ("needs = frozenset({'acumulation'})", "there is no capability 'acumulation'"),
    "no batch": ("batch_size = 0", "batch_size is 0: it must be a whole number, 1 or more"),
    "a precision that is none": ("precisions = ('fp32',)", "there is no precision 'fp32'"),
    "a batch that devices cannot share": (
        "def global_batch_size(self, devices):\n    return 24 + devices % 2\n\n"
        "def samples(self, devices):\n    return 72",
        "global_batch_size(3) is 25, which 3 devices cannot share equally",
    ),
    "half of the parameters": (
        "def optimizer(self, params):\n    return torch.optim.SGD([*params][:2], lr=0.1)",
        "parameter layers.2.weight is in 0 optimizers",
    ),
    "no optimizer": ("def optimizer(self, params):\n    return None", "returns NoneType"),
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
