"""Ranks that the trainer starts itself: they compute the same as one process, and end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from plumbline.trainer import MisconfigurationError, RankError, Trainer


def ddp(world, **options):
    options = {"max_epochs": 2, "precision": 64, **options}
    return Trainer(gpus=world, distributed_backend="ddp", accelerator="cpu", **options)


def test_two_ranks_compute_what_one_device_does(problem, tmp_path):
    # 26 samples: batches of 3 on 2 ranks; the 5th has one sample a rank. Windows of 3 and 2.
    module = problem.Regression(batch_size=3, log=tmp_path, validates=True)
    module.share_memory()  # if ranks shared this memory, it would be stepped twice
    before = [weight.detach().clone() for weight in module.parameters()]
    trainer = ddp(2, accumulate_grad_batches=3, gradient_clip_val=0.3)
    trainer.fit(module)
    one = problem.by_hand(batch=6, accumulate=3, clip=0.3)
    assert problem.same_weights(module.net, one)
    assert not any(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    with torch.no_grad():
        expected = nn.functional.mse_loss(one(module.dataset.inputs), module.dataset.targets)
    assert trainer.metrics["mse"] == pytest.approx(float(expected), rel=1e-12)
    ranks = problem.logged(tmp_path, 2)
    steps = [sorted(left + right) for left, right in zip(*ranks, strict=True)]
    epochs = [order.split(6) for order in problem.orders(26, 2)]
    assert steps == [sorted(indices.tolist()) for epoch in epochs for indices in epoch]


def test_unequal_shares_follow_the_contract(problem, tmp_path):
    # 26 samples on 4 ranks are padded by 2; a window's last micro-batch has one sample a rank.
    module = problem.Regression(batch_size=2, log=tmp_path, validates=True)
    trainer = ddp(4, accumulate_grad_batches=2)
    trainer.fit(module)
    assert problem.same_weights(module.net, problem.by_hand(batch=2, world=4, accumulate=2))
    used = [index for rank in problem.logged(tmp_path, 4) for batch in rank[:4] for index in batch]
    assert set(used) == set(range(26))
    assert len(used) == 28
    with torch.no_grad():
        expected = nn.functional.mse_loss(module.net(module.dataset.inputs), module.dataset.targets)
    assert trainer.metrics["mse"] == pytest.approx(float(expected), rel=1e-12), "validation repeats no sample"


def test_no_rank_and_no_fit_draws_the_noise_of_another(problem, tmp_path):
    class Noisy(problem.Regression):
        def training_step(self, batch, batch_idx):
            with open(self.log / "noise", "a") as file:
                file.write(f"{torch.rand((), dtype=torch.float64).item()}\n")
            return super().training_step(batch, batch_idx)

    module = Noisy(batch_size=13, log=tmp_path)
    for _ in range(2):
        ddp(2, max_epochs=1).fit(module)
    noise = (tmp_path / "noise").read_text().split()
    assert len(set(noise)) == len(noise) == 4


def test_overrides_buffers_noise_and_samplers_in_real_ranks(problem, tmp_path):
    class Overridden(problem.Regression):
        def __init__(self):
            super().__init__(batch_size=3, log=tmp_path, validates=True)
            self.norm = nn.BatchNorm1d(5).double()
            self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))

        def note(self, text):
            with open(self.log / f"notes{self.trainer.rank}", "a") as file:
                file.write(text + "\n")

        def init_ddp_connection(self, proc_rank, world_size):
            self.note(f"connect {proc_rank} {world_size} {os.environ['RANK']} {os.environ['LOCAL_RANK']}")
            super().init_ddp_connection(proc_rank, world_size)

        def configure_ddp(self, model, device_ids):
            self.note(f"configure {device_ids}")
            return DistributedDataParallel(model, bucket_cap_mb=1)

        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.note(f"noise {torch.rand(()).item()}")
            return nn.functional.mse_loss(self.net(self.norm(batch["x"])), batch["y"])

        def validation_step(self, batch, batch_idx):
            mean = self.norm.running_mean.clone()
            dist.broadcast(mean, src=0)
            same = torch.equal(mean, self.norm.running_mean)
            return {"same": float(same)}

        def train_dataloader(self):
            return DataLoader(self.dataset, batch_size=3, sampler=RandomSampler(self.dataset, num_samples=24))

    module = Overridden()
    trainer = ddp(2)
    trainer.fit(module)
    notes = [(tmp_path / f"notes{rank}").read_text().splitlines() for rank in (0, 1)]
    assert [rank[:2] for rank in notes] == [[f"connect {r} 2 {r} {r}", "configure None"] for r in (0, 1)]
    assert notes[0][2:] != notes[1][2:], "ranks draw noise of their own"
    assert trainer.metrics["same"] == 1.0, "validation sees the same running statistics on all ranks"
    assert module.norm.num_batches_tracked == 8


def test_a_custom_order_is_rank_0s(problem, tmp_path):
    class Sampled(problem.Regression):
        def train_dataloader(self):
            torch.manual_seed(100 + self.trainer.rank)  # ranks with different orders stay disjoint
            sampler = RandomSampler(self.dataset, num_samples=20)
            return DataLoader(self.dataset, batch_size=3, sampler=sampler, num_workers=1)

        def configure_optimizers(self):
            # Two optimizers: each averages its own gradients over ranks.
            return [torch.optim.SGD(self.net[layer].parameters(), lr=0.1) for layer in (0, 2)]

    module = Sampled(log=tmp_path)
    ddp(2, max_epochs=1, accumulate_grad_batches=2).fit(module)
    ranks = [[i for batch in rank[::2] for i in batch] for rank in problem.logged(tmp_path, 2)]
    assert len({*ranks[0], *ranks[1]}) == 20
    data, net = problem.Points(), problem.network()
    first, second = Sampled.configure_optimizers(type("Holder", (), {"net": net}))

    def add_gradients(layer, indices):
        loss = sum(nn.functional.mse_loss(net(data.inputs[i]), data.targets[i]) for i in indices) / 4
        weights = list(net[layer].parameters())
        for weight, part in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = part if weight.grad is None else weight.grad + part

    micro = [[rank[start : start + 3] for rank in ranks] for start in range(0, 10, 3)]
    for early, late in (micro[:2], micro[2:]):
        add_gradients(0, early)
        add_gradients(2, early)
        add_gradients(0, late)
        first.step()
        add_gradients(2, late)  # the second optimizer's turn comes after the first one has stepped
        second.step()
        net.zero_grad()
    assert problem.same_weights(module.net, net, 1e-12)


def test_an_inf_on_one_rank_skips_the_step_on_all(problem, tmp_path):
    class Overflows(problem.Regression):
        def __init__(self):
            super().__init__(batch_size=3)
            self.float()
            self.dataset.inputs = self.dataset.inputs.float()
            self.dataset.targets = self.dataset.targets.float()

        def training_step(self, batch, batch_idx):
            with open(tmp_path / f"rank{self.trainer.rank}", "a") as file:
                file.write(f"{self.net[0].weight.sum().item()!r}\n")
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 2 and self.trainer.rank == 1 else loss

    trainer = ddp(2, precision=16, max_epochs=1)
    trainer.fit(Overflows())
    left, right = ((tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1))
    assert left == right
    assert left[2] == left[3], "the third step was skipped"
    assert len(set(left)) > 2
    assert trainer.checkpoint()["precision"]["scaler"]["scale"] < 65536.0


def test_a_stream_that_shards_unevenly_does_not_hang(problem, tmp_path):
    class Stream(IterableDataset):
        indices = range(26)

        def shard(self, num_shards, index):
            share = Stream()
            share.indices = range(9) if index == 0 else range(9, 26)
            return share

        def __iter__(self):
            data = problem.Points()
            return (data[index] for index in self.indices)

    class Streamed(problem.Regression):
        def train_dataloader(self):
            return DataLoader(Stream(), batch_size=3)

    trainer = ddp(2, accumulate_grad_batches=2)
    trainer.fit(Streamed(log=tmp_path))
    assert trainer.global_step == 4
    assert [len(rank) for rank in problem.logged(tmp_path, 2)] == [6, 6]


def test_an_error_on_a_rank_comes_back_and_ends_the_others(problem, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Fails(problem.Regression):
        def training_step(self, batch, batch_idx):
            if self.trainer.rank == 1 and batch_idx == 1:
                raise ArithmeticError("three is not four")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RankError, match="Rank 1 failed: ArithmeticError: three is not four") as caught:
        ddp(3).fit(Fails(batch_size=2))
    assert caught.value.rank == 1
    assert "in training_step" in str(caught.value)

    class Exits(problem.Regression):
        def training_step(self, batch, batch_idx):
            os._exit(3 if self.trainer.rank == 0 else 0)

    with pytest.raises(RankError, match=r"Rank \d ended"):
        ddp(2).fit(Exits())
    assert not [*tmp_path.glob("pytorch-errorfile-*"), *tmp_path.glob("trainer-*")]


def test_an_unused_weight_is_named_at_once(problem):
    class Unused(problem.Regression):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(1, 1).double()

    with pytest.raises(RankError, match="find_unused_parameters=True in configure_ddp"):
        ddp(2, max_steps=1).fit(Unused())


def test_what_is_refused_before_any_process_starts(problem, monkeypatch):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    class Streamed(problem.Regression):
        def train_dataloader(self):
            return DataLoader(Stream())

    class Listed(problem.Regression):
        def train_dataloader(self):
            return [1, 2]

    def started(*_, **__):
        pytest.fail("a process was started")

    monkeypatch.setattr("plumbline.trainer.trainer.start_processes", started)
    for module, sentence in (
        (Streamed(), "shard"),
        (Listed(), "DataLoader"),
        (problem.Regression(samples=3), "3 samples for 4 processes"),
        (problem.Regression(samples=6, batch_size=2, drop_last=True), "has no batches"),
    ):
        with pytest.raises(MisconfigurationError, match=sentence):
            ddp(4).fit(module)


@pytest.mark.parametrize("backend", ["ddp", "ddp2"])
def test_a_world_of_one_trains_in_this_process(problem, backend):
    module = problem.Regression()
    gpus = 1 if backend == "ddp" else 2
    Trainer(gpus=gpus, distributed_backend=backend, accelerator="cpu", precision=64, max_epochs=2).fit(module)
    assert backend == "ddp2" or problem.same_weights(module.net, problem.by_hand())

    class Wrong(problem.Regression):
        def training_step(self, batch, batch_idx):
            return self.net(batch["x"])

    with pytest.raises(MisconfigurationError, match="not a scalar"):
        Trainer(gpus=gpus, distributed_backend=backend, accelerator="cpu", precision=64).fit(Wrong())
    assert not dist.is_initialized()


def test_spawned_ranks(tmp_path):
    """The module is pickled; its tensors arrive in shared memory, but stay separate."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, TensorDataset
            from plumbline.trainer import Module, Trainer

            class Slope(Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.zeros(()))
                def training_step(self, batch, batch_idx):
                    return (self.weight * batch[0]).mean()
                def configure_optimizers(self):
                    return torch.optim.SGD(self.parameters(), lr=1.0)
                def train_dataloader(self):
                    return DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)

            if __name__ == "__main__":
                module = Slope()
                trainer = Trainer(gpus=2, distributed_backend="ddp", accelerator="cpu", start_method="spawn")
                trainer.fit(module)
                print(module.weight.item(), trainer.global_step)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=600, env={**os.environ, **PATHS}
    )
    assert done.stdout.split() == ["-3.5", "1"], done.stderr


PATHS = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
