"""Fabric 2.6.6, ModelParallelStrategy: loading does not change a scheduler, and replaces its entry by a dict.

Prints how many steps the scheduler has counted: 1 after one step. A new training loads this state, and prints 0; with
``strategy="ddp"``, it prints 1.
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
