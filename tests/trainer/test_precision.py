"""Each AMP level compared with a hand-written loop that uses torch.amp directly."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from plumbline.trainer import Trainer

HALF = {16: torch.float16, "bf16": torch.bfloat16}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def batches(problem, dtype):
    data = problem.Points()
    for order in problem.orders(26, 2):
        for indices in order.split(6):
            yield data.inputs[indices].to(dtype), data.targets[indices].to(dtype)


def scaler_for(dtype):
    return torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)


def level_1(problem, dtype, clip):
    net, scaler = network(), scaler_for(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(problem, torch.float32):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = nn.functional.mse_loss(net(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
    return net, scaler.get_scale()


def level_2(problem, dtype, clip):
    net, scaler = network().to(dtype), scaler_for(dtype)
    net[1] = network()[1]
    weights = list(net.parameters())
    masters = [nn.Parameter(w.detach().float()) if w.dtype is dtype else w for w in weights]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for inputs, targets in batches(problem, dtype):
        for tensor in (*weights, *masters):
            tensor.grad = None
        scaler.scale(nn.functional.mse_loss(net(inputs), targets)).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad.float()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters, clip)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    return net, scaler.get_scale()


def level_3(problem, dtype, clip):
    net = network().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches(problem, dtype):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net, 1.0


def learner(problem):
    class Learner(problem.Regression):
        def __init__(self, **options):
            super().__init__(**options)
            self.net = network()
            self.dataset.inputs = self.dataset.inputs.float()
            self.dataset.targets = self.dataset.targets.float()

    return Learner


@pytest.mark.parametrize("precision", [16, "bf16"])
@pytest.mark.parametrize(("level", "by_hand"), [("O1", level_1), ("O2", level_2), ("O3", level_3)])
def test_levels(problem, precision, level, by_hand):
    dtype = HALF[precision]
    module = learner(problem)(validates=True)
    trainer = Trainer(accelerator="cpu", precision=precision, amp_level=level, gradient_clip_val=0.5, max_epochs=2)
    trainer.fit(module)
    expected, scale = by_hand(problem, dtype, 0.5)
    for (name, weight), (_, wanted) in zip(module.net.state_dict().items(), expected.state_dict().items(), strict=True):
        assert weight.dtype is wanted.dtype, name
        assert torch.equal(weight, wanted), name
    assert not torch.equal(expected[0].weight, network()[0].weight.to(expected[0].weight.dtype))
    assert trainer.metrics["mse"] > 0
    assert all(weight.grad is None for weight in module.parameters())
    saved = trainer.checkpoint()["precision"]
    assert saved.get("scaler", {}).get("scale", 1.0) == scale


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_leaves_everything_still(problem, level):
    class Overflows(learner(problem)):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            state = [weight.detach().clone() for weight in self.parameters()]
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            moments = len(self.trainer.optimizers[0].state)
            self.history.append((state, rate, moments))
            return loss * float("inf") if batch_idx in (0, 2) else loss

        def configure_optimizers(self):
            self.history = []
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
            halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": halved, "interval": "step"}]

    module = Overflows()
    trainer = Trainer(accelerator="cpu", precision=16, amp_level=level)
    # The first scale does not overflow by itself, so that only the two intended steps are skipped.
    original = torch.amp.GradScaler.__init__

    def quiet(self, *args, **options):
        original(self, *args, **options, init_scale=64.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "__init__", quiet)
        trainer.fit(module)
    history = module.history
    unchanged = [
        all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
        for before, after in itertools.pairwise(history)
    ]
    assert unchanged == [True, False, True, False]
    assert [rate for _, rate, _ in history] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4])
    assert [moments > 0 for _, _, moments in history] == [False, False, True, True, True]
    assert trainer.global_step == 5, "a skipped step is a step that was tried"
    assert trainer.checkpoint()["precision"]["scaler"]["scale"] == 16.0


@pytest.mark.parametrize("gpus", [None, 3])
def test_training_step_end_and_replicas_run_under_autocast(problem, gpus):
    dtypes = set()

    class Looks(learner(problem)):
        def training_step(self, batch, batch_idx):
            dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
            return self.net(batch["x"])

        def training_step_end(self, outputs):
            dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
            return (outputs @ outputs.T).mean()

    Trainer(accelerator="cpu", precision="bf16", gpus=gpus).fit(Looks(samples=24))
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("gpus", [None, 3])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"precision": 32}, torch.float32),
        ({"precision": 64}, torch.float64),
        ({"precision": "bf16", "amp_level": "O1"}, torch.float32),
        ({"precision": "bf16", "amp_level": "O2"}, torch.bfloat16),
        ({"precision": "bf16", "amp_level": "O3"}, torch.bfloat16),
    ],
)
def test_the_batch_of_training_step_end_has_the_dtype_of_the_steps(problem, gpus, options, dtype):
    dtypes = set()

    class Looks(learner(problem)):
        def training_step(self, batch, batch_idx):
            dtypes.add(batch["x"].dtype)
            return self.net(batch["x"])

        def training_step_end(self, outputs, batch):
            dtypes.add(batch["x"].dtype)
            assert batch["index"].dtype is torch.int64
            return nn.functional.mse_loss(outputs, batch["y"])

    Trainer(accelerator="cpu", gpus=gpus, **options).fit(Looks(samples=24))
    assert dtypes == {dtype}


def test_64_bits_convert_module_and_batches(problem):
    class Looks(learner(problem)):
        def training_step(self, batch, batch_idx):
            assert batch["x"].dtype is torch.float64
            assert batch["index"].dtype is torch.int64
            return super().training_step(batch, batch_idx)

    module = Looks()
    Trainer(accelerator="cpu", precision=64).fit(module)
    assert {weight.dtype for weight in module.parameters()} == {torch.float64}


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("precision", [16, "bf16"])
def test_levels_on_cuda(problem, precision, level):
    module = learner(problem)(validates=True)
    gpus = min(2, torch.cuda.device_count())
    trainer = Trainer(gpus=gpus, accelerator="cuda", precision=precision, amp_level=level, max_epochs=2)
    trainer.fit(module)
    assert trainer.metrics["mse"] == trainer.metrics["mse"]
    assert module.net[0].weight.is_cuda
