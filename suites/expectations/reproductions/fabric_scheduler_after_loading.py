"""Fabric 2.6.6, ModelParallelStrategy: a scheduler that is loaded stays as it was, and its entry becomes a dict.

Prints how many steps the schedule has counted: after one step 1, and in a new training, which loads that, 1 with
``strategy="ddp"`` and 0 here.
"""

import tempfile

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

sharded = ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), 2, 1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=sharded)
fabric.launch()
folder = fabric.broadcast(tempfile.mkdtemp())
for resumed in (False, True):
    model = fabric.setup_module(torch.nn.Linear(1, 1))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = {"model": model, "scheduler": scheduler}
    if resumed:
        fabric.load(folder, state)
    else:
        scheduler.step()
        fabric.save(folder, state)
    counted = f"{scheduler.last_epoch} steps; {type(state['scheduler']).__name__}"
    fabric.print("lightning", lightning.__version__, "-", counted)
