"""Ignite: a supervised trainer with accumulation on processes that idist spawns.

python ignite_engine.py
"""

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from torch import nn
from torch.utils.data import TensorDataset


def training(local_rank):
    torch.manual_seed(8)
    x = torch.randn(96, 9)
    loader = idist.auto_dataloader(TensorDataset(x, x[:, :2].sum(1, keepdim=True)), batch_size=12, shuffle=True)
    model = idist.auto_model(nn.Sequential(nn.Linear(9, 24), nn.ELU(), nn.Linear(24, 1)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), gradient_accumulation_steps=2)

    @trainer.on(Events.ITERATION_COMPLETED)
    def report(engine):
        print(f"rank {idist.get_rank()} iteration {engine.state.iteration} loss {engine.state.output!r}", flush=True)

    trainer.run(loader, max_epochs=1)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(training)
