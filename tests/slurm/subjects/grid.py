"""The old docs' example: a grid over two hyper-parameters, each trial trained by the Trainer with ddp over nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plumbline import HyperOptArgumentParser, Module, SlurmCluster, Trainer

NODES, GPUS = 2, 1


class Slope(Module):
    """The gradient of its only weight is 1 for any batch: after a step of SGD, it is -learning_rate * factor."""

    def __init__(self, hparams):
        super().__init__()
        self.hparams = hparams
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch[0]).mean() * self.hparams.factor

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, dtype=torch.float64)), batch_size=2)


def main(hparams):
    module = Slope(hparams)
    trainer = Trainer(gpus=GPUS, num_nodes=NODES, distributed_backend="ddp", accelerator="cpu", precision=64)
    trainer.fit(module)
    name = f"{hparams.learning_rate}-{hparams.factor}-{trainer.rank}-of-{trainer.world_size}"
    (Path(hparams.results) / name).write_text(str(module.weight.item()))


if __name__ == "__main__":
    parser = HyperOptArgumentParser(strategy="grid_search")
    parser.add_argument("results")
    parser.opt_list("--learning_rate", default=0.5, type=float, options=[0.5, 0.25, 0.125], tunable=True)
    parser.opt_list("--factor", default=1, type=int, options=[1, 2, 4], tunable=True)
    hyperparameters = parser.parse_args()

    cluster = SlurmCluster(
        hyperparam_optimizer=hyperparameters, log_path=hyperparameters.results, python_cmd=sys.executable
    )
    cluster.per_experiment_nb_nodes = NODES
    cluster.per_experiment_nb_gpus = GPUS
    cluster.job_time = "00:05:00"
    cluster.add_command("export MASTER_ADDR=127.0.0.1")  # this cluster's node names do not resolve
    cluster.add_command("export OMP_NUM_THREADS=1")
    cluster.add_slurm_cmd(cmd="ntasks-per-node", value=GPUS, comment="one task a gpu")
    cluster.optimize_parallel_cluster_gpu(main, nb_trials=9, job_name="grid")
