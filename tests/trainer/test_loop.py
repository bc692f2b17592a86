"""The loop on one device and on simulated ones, compared with a hand-written loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from plumbline.trainer import MisconfigurationError, Module, Trainer


def fit(module, **options):
    trainer = Trainer(accelerator="cpu", precision=64, **{"max_epochs": 2, **options})
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize("gpus", [None, 1, 3])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (3, 0.05)])
def test_weights_are_those_of_the_loop_by_hand(problem, gpus, accumulate, clip):
    # 26 samples in batches of 6 make 5 micro-batches, so the last window is short for 2 and for 3; the last
    # batch has 2 samples, fewer than 3 devices.
    class Gathered(problem.Regression):
        def training_step(self, batch, batch_idx):
            return {"out": self.net(batch["x"]), "y": batch["y"]}

        def training_step_end(self, parts):
            return nn.functional.mse_loss(parts["out"], parts["y"])

    module = Gathered()
    trainer = fit(module, gpus=gpus, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    assert problem.same_weights(module.net, problem.by_hand(accumulate=accumulate, clip=clip))
    assert trainer.current_epoch == 2
    assert trainer.global_step == 2 * -(-5 // accumulate)


@pytest.mark.parametrize("gpus", [None, 1, 3])
def test_training_step_end_may_ask_for_the_whole_batch(problem, gpus):
    class Asking(problem.Regression):
        def training_step(self, batch, batch_idx):
            return self.net(batch["x"])

        def training_step_end(self, outputs, batch):
            assert len(outputs) == len(batch["x"])
            return nn.functional.mse_loss(outputs, batch["y"])

    module = Asking()
    fit(module, gpus=gpus, accumulate_grad_batches=2)
    assert problem.same_weights(module.net, problem.by_hand(accumulate=2))


class Keeping(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        """Count, and keep half of the gradients, like error feedback."""
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / 2


def test_an_optimizers_own_zero_grad_is_called(problem):
    class Kept(problem.Regression):
        def configure_optimizers(self):
            return Keeping(self.parameters(), lr=0.01)

    module = Kept()
    trainer = fit(module)
    assert trainer.optimizers[0].calls == trainer.global_step
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_weights_that_join_an_optimizer_later_have_their_gradients_cleared_too(problem):
    class Thawing(problem.Regression):
        def on_metrics(self, metrics):
            if self.trainer.current_epoch == 0:
                self.trainer.optimizers[0].add_param_group({"params": list(self.net[-1].parameters())})

        def configure_optimizers(self):
            return torch.optim.SGD(self.net[0].parameters(), lr=0.01)

    module = Thawing()
    fit(module)
    assert [parameter.grad for parameter in module.parameters()] == [None] * len(list(module.parameters()))


def test_without_training_step_end_the_replicas_losses_are_averaged(problem):
    module = problem.Regression()
    fit(module, gpus=3)
    data, net = problem.Points(), problem.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for order in problem.orders(26, 2):
        for indices in order.split(6):
            losses = [nn.functional.mse_loss(net(data.inputs[c]), data.targets[c]) for c in indices.chunk(3)]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    assert problem.same_weights(module.net, net)


def contrastive(embedded):
    logits = embedded @ embedded.T
    return nn.functional.cross_entropy(logits, torch.arange(len(embedded)).roll(1))


def test_a_contrastive_loss_sees_its_whole_batch(problem):
    class Contrastive(problem.Regression):
        def __init__(self):
            super().__init__(batch_size=8)
            self.net = nn.Sequential(problem.network()[0])

        def training_step(self, batch, batch_idx):
            return self.net(batch["x"])

        def training_step_end(self, embedded):
            return {"loss": contrastive(embedded)}

    one, many = Contrastive(), Contrastive()
    fit(one)
    fit(many, gpus=4)
    data, net = problem.Points(), nn.Sequential(problem.network()[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for order in problem.orders(26, 2):
        for indices in order.split(8):
            optimizer.zero_grad()
            contrastive(net(data.inputs[indices])).backward()
            optimizer.step()
    for module in (one, many):
        for left, right in zip(module.net.parameters(), net.parameters(), strict=True):
            assert torch.allclose(left, right, rtol=1e-12)


@pytest.mark.parametrize("gpus", [None, 3])
def test_validation_in_the_middle_of_a_window_changes_nothing_but_metrics(problem, gpus):
    class Watched(problem.Regression):
        def __init__(self, **options):
            super().__init__(**options)
            self.norm = nn.BatchNorm1d(5).double()
            self.frozen = nn.Dropout(0.5).eval()
            self.seen = []

        def training_step(self, batch, batch_idx):
            assert self.training
            assert not self.frozen.training, "a layer that the user put into evaluation stays there"
            out = self.net(self.frozen(self.norm(batch["x"])))
            return {"out": out, "y": batch["y"]}

        def training_step_end(self, parts):
            return nn.functional.mse_loss(parts["out"], parts["y"])

        def validation_step(self, batch, batch_idx):
            assert not self.training
            assert not torch.is_grad_enabled()
            self.seen.append(len(batch["x"]))
            return {"mse": ((self.net(self.norm(batch["x"])) - batch["y"]) ** 2).mean(), "one": 1.0}

    quiet, watched = Watched(samples=28), Watched(samples=28, validates=True)
    fit(quiet, gpus=gpus, accumulate_grad_batches=3)
    fit(watched, gpus=gpus, accumulate_grad_batches=3, val_check_interval=2)
    assert problem.same_weights(watched.net, quiet.net, 0)
    assert all(torch.equal(a, b) for a, b in zip(quiet.buffers(), watched.buffers(), strict=True))
    assert sum(watched.seen) == 28 * 2 * 2, "two validations an epoch, each of every sample"

    last = Watched(samples=28, validates=True)
    trainer = fit(last, gpus=gpus)
    last.eval()
    with torch.no_grad():
        expected = nn.functional.mse_loss(last.net(last.norm(last.dataset.inputs)), last.dataset.targets)
    assert trainer.metrics["mse"] == pytest.approx(float(expected), rel=1e-13), "a mean of samples, not of batches"
    assert trainer.metrics["one"] == 1.0


def test_schedulers_step_once_an_epoch_or_once_an_optimizer_step(problem):
    rates = {}

    class Scheduled(problem.Regression):
        def __init__(self, interval):
            super().__init__(validates=True)
            self.interval = interval

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            entry = {"scheduler": self.scheduler, "interval": "step"} if self.interval == "step" else self.scheduler
            return [optimizer], [entry, {"scheduler": plateau, "monitor": "mse"}]

    for interval in ("epoch", "step"):
        module = Scheduled(interval)
        trainer = fit(module, accumulate_grad_batches=2)
        rates[interval] = module.scheduler.last_epoch
        assert trainer.global_step == 6
    assert rates == {"epoch": 2, "step": 6}


def test_several_optimizers_take_turns_with_their_own_weights_only(problem):
    class Turns(problem.Regression):
        def __init__(self):
            super().__init__(batch_size=8)
            self.polluted = []

        def training_step(self, batch, batch_idx, optimizer_idx):
            own, other = (self.net[0], self.net[2]) if optimizer_idx == 0 else (self.net[2], self.net[0])
            assert all(weight.requires_grad for weight in own.parameters())
            assert not any(weight.requires_grad for weight in other.parameters())
            error = self.net(batch["x"]) - batch["y"]
            return error.square().mean() if optimizer_idx == 0 else error.abs().mean()

        def configure_optimizers(self):
            first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
            return [first, torch.optim.Adam(self.net[2].parameters(), lr=0.01)]

    data, net = problem.Points(), problem.network()
    optimizers = Turns.configure_optimizers(type("Holder", (), {"net": net}))
    for order in problem.orders(26, 2):
        micro = order.split(8)  # 4 micro-batches: windows of 3 and 1
        for window in (micro[:3], micro[3:]):
            sums = [[torch.zeros_like(w) for w in net[layer].parameters()] for layer in (0, 2)]
            for index, indices in enumerate(window):
                for turn, layer in enumerate((0, 2)):
                    error = net(data.inputs[indices]) - data.targets[indices]
                    loss = (error.abs() if turn else error.square()).mean() / len(window)
                    own = list(net[layer].parameters())
                    for total, part in zip(sums[turn], torch.autograd.grad(loss, own), strict=True):
                        total += part
                    if index == len(window) - 1:
                        for weight, total in zip(own, sums[turn], strict=True):
                            weight.grad = total
                        optimizers[turn].step()
    for options in ({}, {"gpus": 2}):
        module = Turns()
        trainer = fit(module, accumulate_grad_batches=3, **options)
        assert problem.same_weights(module.net, net, 1e-12)
        assert trainer.global_step == 4
        assert all(weight.requires_grad for weight in module.parameters())


@pytest.mark.parametrize("steps", [0, 1, 5, 7])
def test_max_steps_counts_optimizer_steps(problem, steps):
    module = problem.Regression(validates=True)
    trainer = fit(module, max_steps=steps, max_epochs=None)
    assert (trainer.global_step, trainer.current_epoch) == (steps, steps // 5)
    assert ("mse" in trainer.metrics) == (steps >= 5), "an epoch that is just complete ends as one"
    assert problem.same_weights(module.net, problem.by_hand(steps=steps)) or steps == 0


def test_a_stream_of_unknown_length_has_its_short_window_too(problem):
    class Stream(IterableDataset):
        def __iter__(self):
            data = problem.Points()
            return (data[index] for index in range(26))

    class Streamed(problem.Regression):
        def train_dataloader(self):
            return DataLoader(Stream(), batch_size=6)

    module = Streamed()
    trainer = fit(module, accumulate_grad_batches=2)
    assert trainer.global_step == 6
    data, net = problem.Points(), problem.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        micro = torch.arange(26).split(6)
        for window in (micro[:2], micro[2:4], micro[4:]):
            optimizer.zero_grad()
            for indices in window:
                loss = nn.functional.mse_loss(net(data.inputs[indices]), data.targets[indices])
                (loss / len(window)).backward()
            optimizer.step()
    assert problem.same_weights(module.net, net)


def test_old_gradients_and_an_evaluating_module_do_not_matter(problem):
    module = problem.Regression()
    for weight in module.parameters():
        weight.grad = torch.full_like(weight, 1e6)
    module.eval()
    fit(module)
    assert problem.same_weights(module.net, problem.by_hand())
    assert module.training


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda batch: (batch["x"] * 1).mean(1), r"a tensor of shape \(6,\)"),
        (lambda batch: 1.0, "The loss is float"),
        (lambda batch: None, "The loss is NoneType"),
        (lambda batch: {"los": batch["x"].mean()}, "The loss is NoneType"),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_a_loss_that_is_no_scalar_is_refused(problem, loss, sentence, ends):
    class Wrong(problem.Regression):
        def training_step(self, batch, batch_idx):
            return loss(batch)

    if ends:
        Wrong.training_step_end = lambda self, outputs: outputs
    with pytest.raises(MisconfigurationError, match=sentence + r".*return loss.mean\(\)"):
        fit(Wrong())


def test_what_fit_refuses_before_it_starts(problem, tmp_path):
    def refused(sentence, module, **options):
        with pytest.raises(MisconfigurationError, match=sentence):
            fit(module, **options)

    class Bare(Module):
        pass

    class Validated(problem.Regression):
        validation_step = Module.validation_step

    class Foreign(problem.Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(problem.network().parameters(), lr=1)

    class Nothing(problem.Regression):
        def configure_optimizers(self):
            return None

    class Misspelt(problem.Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "intervall": "step"}]

    class Plateau(problem.Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    refused("subclass of Module", nn.Linear(1, 1))
    refused("Bare has no training_step", Bare())
    refused("Validated has no validation_step", Validated())
    refused("self.parameters", Foreign())
    refused("configure_optimizers returned NoneType", Nothing())
    refused("'intervall'", Misspelt())
    refused("'monitor'", Plateau())
    refused("has no batches", problem.Regression(batch_size=100, drop_last=True))
    refused("has no batches", problem.Regression(samples=0, shuffle=False))
    refused("batches of 2, fewer than the 3 devices", problem.Regression(batch_size=2), gpus=3)
    with pytest.raises(MisconfigurationError, match="no checkpoint"):
        Trainer().fit(problem.Regression(), ckpt_path=tmp_path / "none.ckpt")
    with pytest.raises(MisconfigurationError, match="call fit first"):
        Trainer().save_checkpoint(tmp_path / "none.ckpt")
