"""The trainer's second interface: it computes the same as the hand-written loop, and refuses what it cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils.data import DataLoader

from plumbline.trainer import MisconfigurationError, RankError, TrainLoop
from plumbline.trainer.environments import free_port


class Net(nn.Sequential):
    """A network for the problem, with the methods of a TrainLoop's model; ``log`` is a folder for its inputs."""

    def __init__(self, problem, log=None):
        super().__init__(*problem.network())
        self.log = log

    def get_loss(self, batch, criterion, device):
        if self.log:
            with open(self.log / f"rank{os.environ.get('RANK', 0)}.jsonl", "a") as file:
                file.write(json.dumps(batch["index"].tolist()) + "\n")
        return criterion(self(batch["x"].to(device)), batch["y"].to(device))

    def get_loss_eval(self, batch, criterion, device):
        assert not self.training
        assert not torch.is_grad_enabled()
        return criterion(self(batch["x"].to(device)), batch["y"].to(device))

    def get_predictions(self, batch, device):
        assert not self.training
        return self(batch["x"].to(device)), batch["y"], {"index": batch["index"], "names": [f"{i}" for i in batch["y"]]}


@pytest.fixture
def loop(problem):
    def build(model=None, *, batch=6, samples=26, validates=False, tests=False, criterion=None, **options):
        model = Net(problem) if model is None else model
        data = problem.Points(samples)
        return TrainLoop(
            model,
            DataLoader(data, batch_size=batch, shuffle=True),
            DataLoader(data, batch_size=5) if validates else None,
            DataLoader(data, batch_size=4) if tests else None,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            criterion or nn.MSELoss(),
            **{"accelerator": "cpu", **options},
        )

    return build


@pytest.mark.parametrize(
    ("gpu_mode", "num_gpus", "batch", "world"), [("single", None, 6, 1), ("dp", 3, 6, 1), ("ddp", 2, 3, 2)]
)
def test_each_mode_trains_as_one_device_does(problem, loop, gpu_mode, num_gpus, batch, world, tmp_path):
    # 26 samples in steps of 6: the last batch is short, and with dp has fewer samples than there are devices.
    model = Net(problem, tmp_path)
    trained = loop(model, batch=batch, gpu_mode=gpu_mode, validates=True, tests=True)
    trained.fit(2, num_gpus=num_gpus)
    assert problem.same_weights(model, problem.by_hand())
    ranks = problem.logged(tmp_path, world)
    steps = [sorted(index for share in shares for index in share) for shares in zip(*ranks, strict=True)]
    epochs = [order.split(6) for order in problem.orders(26, 2)]
    assert steps == [sorted(indices.tolist()) for epoch in epochs for indices in epoch]
    data = problem.Points()
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(model(data.inputs), data.targets))
    assert trained.metrics["val_loss"] == pytest.approx(expected, rel=1e-12), "a mean of samples, not of batches"
    assert trained.evaluate() == pytest.approx(expected, rel=1e-12)
    assert model.training, "an evaluation leaves the mode as it was"
    momenta = [state["momentum_buffer"] for state in trained.optimizer.state.values()]
    assert len(momenta) == 4, "the optimizer in this process is as training left it"


@pytest.mark.parametrize(("gpu_mode", "batch"), [("single", 6), ("ddp", 3), ("balanced", 6)])
def test_a_second_fit_goes_on_where_the_first_ended(problem, loop, gpu_mode, batch):
    # Momentum and order continue. In shared memory, all ranks would step the same momentum.
    model = Net(problem)
    trained = loop(model, batch=batch, gpu_mode=gpu_mode)
    for _ in range(2):
        trained.fit(1, num_gpus=None if gpu_mode == "single" else 2)
        for state in trained.optimizer.state.values():
            state["momentum_buffer"].share_memory_()
    assert trained.epochs == 2
    assert problem.same_weights(model, problem.by_hand())


def contrastive(embedded, targets):
    """In-batch negatives: the loss is right only with all of the batch's outputs together."""
    return nn.functional.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)).roll(1)) + 0 * targets.sum()


def test_with_dp_the_forward_is_split_and_the_criterion_sees_the_whole_batch(problem, loop):
    class Watched(Net):
        def forward(self, x, *, scale):
            self.seen.append(len(x))
            return super().forward(x) * scale

        def get_loss(self, batch, criterion, device):
            return criterion(self(batch["x"], scale=2.0), batch["y"])

    one, many = Watched(problem), Watched(problem)
    one.seen, many.seen, calls = [], [], []  # a replica's assignments are lost with it
    many.register_forward_hook(lambda model, inputs, outputs: calls.append(len(outputs)))
    loop(one, batch=8, criterion=contrastive).fit(1)
    loop(many, batch=8, criterion=contrastive, gpu_mode="dp").fit(1, num_gpus=3)
    assert problem.same_weights(one, many)
    assert one.seen == [8, 8, 8, 2]
    assert many.seen == [3, 3, 2] * 3 + [1, 1]
    assert calls == [8, 8, 8, 2]
    assert "forward" not in vars(many)


def test_with_ddp_a_loss_that_goes_past_the_forward_is_synchronised_all_the_same(problem, loop):
    class Roundabout(Net):
        def get_loss(self, batch, criterion, device):
            return criterion(self[2](self[1](self[0](batch["x"]))), batch["y"])

    model = Roundabout(problem)
    loop(model, batch=3, gpu_mode="ddp").fit(2, num_gpus=2)
    assert problem.same_weights(model, problem.by_hand())


@pytest.mark.parametrize("gpu_mode", ["single", "dp", "ddp"])
def test_amp_scales_the_loss_and_takes_the_forward_to_float16(problem, loop, gpu_mode, tmp_path):
    class Half(Net):
        def get_loss(self, batch, criterion, device):
            outputs = self(batch["x"].float())
            outputs.register_hook(lambda gradient: (tmp_path / f"{gradient.abs().max():.0f}").touch())
            assert outputs.dtype is torch.float16
            return criterion(outputs, batch["y"].half())

    model = Half(problem).float()
    begun = [weight.detach().clone() for weight in model.parameters()]
    loop(model, gpu_mode=gpu_mode, use_amp=True).fit(1, num_gpus=None if gpu_mode == "single" else 2)
    assert all(weight.dtype is torch.float32 for weight in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(begun, model.parameters(), strict=True))
    assert max(float(path.name) for path in tmp_path.iterdir()) > 1000


def test_predictions_of_all_batches_are_concatenated(problem, loop):
    model = Net(problem)
    trained = loop(model, tests=True)
    outputs, targets, extra = trained.predict()
    data = problem.Points()
    assert torch.allclose(outputs, model(data.inputs), rtol=1e-12)
    assert not outputs.requires_grad
    assert torch.equal(targets, data.targets)
    assert extra["index"].tolist() == list(range(26))
    assert len(extra["names"]) == 26
    assert len(trained.predict(DataLoader(problem.Points(7), batch_size=3))[0]) == 7


def test_a_criterion_that_is_a_module_trains_along(problem, loop):
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.ones((), dtype=torch.float64))

        def forward(self, outputs, targets):
            return nn.functional.mse_loss(outputs, targets) * self.factor

    model = Net(problem)
    loop(model, batch=3, criterion=Weighted(), gpu_mode="ddp").fit(2, num_gpus=2)
    assert problem.same_weights(model, problem.by_hand())


def test_two_nodes_of_two_ranks(problem, loop, tmp_path):
    port = free_port()

    def node(rank):
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        model = Net(problem)
        loop(model, batch=2, gpu_mode="ddp").fit(2, num_nodes=2, node_rank=rank, num_gpus=2)
        torch.save(model.state_dict(), tmp_path / f"node{rank}.pt")

    start_processes(node, nprocs=2, start_method="fork")
    for rank in (0, 1):
        model = problem.network()
        model.load_state_dict(torch.load(tmp_path / f"node{rank}.pt"))
        assert problem.same_weights(model, problem.by_hand(batch=2, world=4))


def test_a_process_that_torchrun_started_is_a_rank_and_starts_none(problem, loop, monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in {**torchrun, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("plumbline.trainer.trainer.start_processes", started)
    model = Net(problem)
    loop(model, gpu_mode="ddp").fit(2, num_gpus=1)
    assert problem.same_weights(model, problem.by_hand())
    with pytest.raises(MisconfigurationError, match="WORLD_SIZE=1"):
        loop(gpu_mode="ddp").fit(1, num_gpus=2)


def started(*_, **__):
    pytest.fail("a process was started")


def test_an_error_on_a_rank_comes_back(problem, loop):
    class Vector(Net):
        def get_loss(self, batch, criterion, device):
            return self(batch["x"])

    with pytest.raises(MisconfigurationError, match=r"get_loss of Vector returned a tensor of shape \(6, 1\)"):
        loop(Vector(problem)).fit(1)
    with pytest.raises(RankError, match=r"Rank \d failed.*get_loss of Vector"):
        loop(Vector(problem), gpu_mode="ddp").fit(1, num_gpus=2)


@pytest.mark.parametrize(
    ("gpu_mode", "options", "sentence"),
    [
        ("single", {"num_gpus": 2}, "num_gpus=2 contradicts gpu_mode='single'"),
        ("dp", {"num_nodes": 2}, "num_nodes=2 cannot be trained with gpu_mode='dp'"),
        ("ddp", {"num_gpus": 0}, "num_gpus=0 must be a whole number, 1 or more"),
        ("ddp", {"num_gpus": [0, 1]}, "num_gpus=.* must be a whole number"),
        ("ddp", {"num_nodes": 0}, "num_nodes=0"),
        ("ddp", {"num_nodes": 2, "node_rank": 2}, "node_rank=2 does not exist among num_nodes=2"),
        ("ddp", {"node_rank": 1}, "node_rank=1 does not exist among num_nodes=1"),
        ("ddp", {"node_rank": -1}, "node_rank=-1"),
        ("ddp", {"num_nodes": 2, "num_gpus": 2}, "MASTER_ADDR, MASTER_PORT"),
        ("ddp", {"num_gpus": 27}, "26 samples for 27 processes"),
        ("dp", {"num_gpus": 8}, "batches of 6, fewer than the 8 devices"),
    ],
)
def test_what_cannot_be_fitted_is_refused_before_any_process_starts(loop, monkeypatch, gpu_mode, options, sentence):
    monkeypatch.setattr("plumbline.trainer.trainer.start_processes", started)
    with pytest.raises(MisconfigurationError, match=sentence):
        loop(gpu_mode=gpu_mode).fit(1, **options)


def test_more_cuda_devices_than_there_are(loop):
    count = torch.cuda.device_count()
    with pytest.raises(MisconfigurationError, match=f"there are {count}"):
        loop(gpu_mode="ddp", accelerator="cuda").fit(1, num_gpus=count + 1)


def test_what_is_wrong_with_the_parts_is_said_at_once(problem, loop):
    class OnlyLoss(nn.Linear):
        def get_loss(self, batch, criterion, device): ...

    with pytest.raises(MisconfigurationError, match="did you mean 'ddp'"):
        loop(gpu_mode="ddpp")
    with pytest.raises(MisconfigurationError, match="accelerator='gpu'"):
        loop(accelerator="gpu")
    with pytest.raises(MisconfigurationError, match=r"Linear has no get_loss: .* get_loss\(batch, criterion, device\)"):
        loop(nn.Linear(5, 1))
    loop(OnlyLoss(5, 1))
    with pytest.raises(MisconfigurationError, match="OnlyLoss has no get_loss_eval"):
        loop(OnlyLoss(5, 1), validates=True)
    with pytest.raises(MisconfigurationError, match=r"has no get_predictions: .* get_predictions\(batch, device\)"):
        loop(OnlyLoss(5, 1)).predict([])
    data, others = DataLoader(problem.Points()), torch.optim.SGD(problem.network().parameters())
    with pytest.raises(MisconfigurationError, match=r"parameter of shape \(7, 5\) that is not the model's"):
        TrainLoop(Net(problem), data, None, None, others, nn.MSELoss())
    with pytest.raises(MisconfigurationError, match="The optimizer is a NoneType"):
        TrainLoop(Net(problem), data, None, None, None, nn.MSELoss())
    with pytest.raises(MisconfigurationError, match="The model is a function"):
        TrainLoop(started, data, None, None, others, nn.MSELoss())


def test_a_loader_that_is_none_is_only_missed_where_it_is_needed(problem, loop):
    trained = loop()
    trained.fit(1)
    assert "val_loss" not in trained.metrics
    for ask in (trained.evaluate, trained.predict):
        with pytest.raises(MisconfigurationError, match="give a loader here"):
            ask()
    trained.train_loader = None
    with pytest.raises(MisconfigurationError, match="give TrainLoop a train_loader"):
        trained.fit(1)
    with pytest.raises(MisconfigurationError, match="has no batches"):
        trained.evaluate([])


def test_spawned_ranks(tmp_path):
    """Model and optimizer are pickled together, still belong together, and do not change shared tensors."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn
            from torch.utils.data import DataLoader, TensorDataset
            from plumbline import TrainLoop

            class Slope(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = nn.Parameter(torch.zeros(()))
                def forward(self, x):
                    return self.weight * x
                def get_loss(self, batch, criterion, device):
                    return criterion(self(batch[0].to(device)))

            if __name__ == "__main__":
                model, data = Slope(), DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
                sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
                where = {"accelerator": "cpu", "start_method": "spawn"}
                loop = TrainLoop(model, data, None, None, sgd, torch.mean, gpu_mode="ddp", **where)
                model.weight.grad = torch.ones(())
                sgd.step()
                loop.fit(1, num_gpus=2)
                print(model.weight.item(), sgd.state[model.weight]["momentum_buffer"].item())
            """
        )
    )
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=600, env={**os.environ, **paths}
    )
    assert done.stdout.split() == ["-5.0", "4.0"], done.stderr
