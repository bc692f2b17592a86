"""Ranks that others started: torchrun, SLURM, one parent per node, the user's own process group."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes

from plumbline.trainer import Trainer
from plumbline.trainer.environments import free_port


def torchrun_node(rank, port):
    """Return what a harness sets for one process per node, with a running store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def slurm_node(rank, port):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "MASTER_PORT": str(port),
    }


def plain_node(rank, port):
    return {"NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def on_two_nodes(train, variables, port, folder):
    """Call ``train()`` in two processes with a launcher's variables; return both results."""

    def node(rank):
        torch.set_num_threads(1)
        os.environ.update(variables(rank, port))
        torch.save(train(), folder / f"node{rank}.pt")
        assert not dist.is_initialized()

    start_processes(node, nprocs=2, start_method="fork")
    return [torch.load(folder / f"node{rank}.pt") for rank in (0, 1)]


@pytest.fixture
def contrastive(problem):
    """In-batch negatives: the loss is right only with all of a node's outputs together."""

    class Contrastive(problem.Regression):
        def __init__(self, **options):
            super().__init__(batch_size=8, samples=32, **options)

        def training_step(self, batch, batch_idx):
            return {"out": self.net[0](batch["x"]) + 0 * self.net(batch["x"]), "index": batch["index"]}

        def training_step_end(self, parts):
            return self.loss(parts["out"])

        @staticmethod
        def loss(embedded):
            return nn.functional.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)).roll(1))

    return Contrastive


def contrastive_by_hand(problem, loss):
    """Two nodes of 8 samples: the mean of their losses, each over the whole node."""
    data, net = problem.Points(32), problem.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for order in problem.orders(32, 2):
        for indices in order.split(16):
            nodes = [net[0](data.inputs[indices[rank::2]]) for rank in (0, 1)]
            optimizer.zero_grad()
            (sum(loss(node) for node in nodes) / 2).backward()
            optimizer.step()
    return net


@pytest.mark.parametrize("variables", [torchrun_node, slurm_node])
def test_ddp2_on_two_nodes_of_two_devices(problem, contrastive, variables, tmp_path):
    def train():
        module = contrastive()
        calls = []
        module.net[2].register_forward_hook(lambda *_: calls.append(1))
        trainer = Trainer(
            gpus=2, num_nodes=2, distributed_backend="ddp2", accelerator="cpu", precision=64, max_epochs=2
        )
        trainer.fit(module)
        assert len(calls) == 2 * trainer.global_step, "a hook fires once a replica"
        return module.net.state_dict()

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if variables is torchrun_node else free_port()
    expected = contrastive_by_hand(problem, contrastive.loss)
    for state in on_two_nodes(train, variables, port, tmp_path):
        node = problem.network()
        node.load_state_dict(state)
        assert torch.allclose(node[0].weight, expected[0].weight, rtol=1e-12)
        assert not torch.equal(node[0].weight, problem.network()[0].weight)


def test_plain_ddp_on_two_nodes_of_two_ranks(problem, tmp_path):
    def train():
        module = problem.Regression(batch_size=2, samples=26)
        Trainer(gpus=2, num_nodes=2, distributed_backend="ddp", accelerator="cpu", precision=64, max_epochs=2).fit(
            module
        )
        return module.net.state_dict()

    for state in on_two_nodes(train, plain_node, free_port(), tmp_path):
        node = problem.network()
        node.load_state_dict(state)
        assert problem.same_weights(node, problem.by_hand(batch=2, world=4))


@pytest.mark.parametrize("stages", [2, 4])
def test_balanced_on_two_nodes_of_two_devices(problem, stages, tmp_path):
    class Deeper(problem.Regression):
        def __init__(self):
            super().__init__(batch_size=8, samples=26)
            self.net.append(nn.Tanh().double())

    def train():
        module = Deeper()
        trainer = Trainer(
            gpus=2, num_nodes=2, distributed_backend="balanced", accelerator="cpu", precision=64, max_epochs=2,
            stages=stages, micro_batches=2,
        )  # fmt: skip
        trainer.fit(module)
        assert (len(trainer.balance.plan.stages), trainer.balance.plan.replicas) == (stages, 4 // stages)
        return module.net.state_dict()

    alone = Deeper()
    Trainer(accelerator="cpu", precision=64, max_epochs=2).fit(alone)
    for state in on_two_nodes(train, plain_node, free_port(), tmp_path):
        for name, value in alone.net.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-12, atol=1e-12)


def test_a_users_own_process_group_is_used_and_left_open(problem, tmp_path):
    port = free_port()

    class Normed(problem.Regression):
        def __init__(self):
            super().__init__(batch_size=3, samples=24)
            self.norm = nn.BatchNorm1d(5, affine=False).double()

        def training_step(self, batch, batch_idx):
            self.norm(batch["x"])
            return super().training_step(batch, batch_idx)

    def rank_main(rank):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        module = Normed()
        Trainer(gpus=2, distributed_backend="ddp", accelerator="cpu", precision=64, max_epochs=2).fit(module)
        assert dist.is_initialized()
        torch.save((module.net.state_dict(), module.norm.running_mean), tmp_path / f"{rank}.pt")
        dist.destroy_process_group()

    start_processes(rank_main, nprocs=2, start_method="fork")
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for state, _ in saved:
        net = problem.network()
        net.load_state_dict(state)
        assert problem.same_weights(net, problem.by_hand(samples=24))
    assert torch.equal(saved[0][1], saved[1][1]), "all ranks end with rank 0's buffers"


def test_torchrun_itself_and_an_error_that_ends_all_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
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

            class Vector(Slope):
                def training_step(self, batch, batch_idx):
                    loss = self.weight * batch[0]
                    return loss if self.trainer.rank else loss.mean()

            module = Slope()
            trainer = Trainer(gpus=2, distributed_backend="ddp", accelerator="cpu")
            trainer.fit(module)
            trainer.save_checkpoint(sys.argv[1])
            if trainer.rank == 0:
                print("weight", module.weight.item())
            trainer.fit(Vector())
            """
        )
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [*launch, script, tmp_path / "saved.ckpt"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as done:
        try:
            output, errors = done.communicate(timeout=600)
        finally:
            done.terminate()  # a launcher that is terminated ends its ranks; one that is killed does not
    assert output.split() == ["weight", "-3.5"], errors
    assert done.returncode != 0, "the second fit has a loss that is no scalar, on one rank only"
    assert "not a scalar tensor: return loss.mean()" in errors
    assert torch.load(tmp_path / "saved.ckpt")["global_step"] == 1
