"""Fabric 2.6.6, two ranks with FSDP2: each rank's BatchNorm keeps statistics of its own samples.

Prints the running mean at the start of each forward. With ``strategy="ddp"``, it is 0 and then 0.2 on both ranks.
"""

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

sharded = ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), 2, 1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=sharded)
fabric.launch()
norm = torch.nn.BatchNorm1d(1)
begins = f"rank {fabric.global_rank}: a forward begins with a running mean of"
norm.register_forward_pre_hook(lambda layer, args: print(f"{begins} {layer.running_mean.item():.1f}"))
model = fabric.setup_module(torch.nn.Sequential(norm, torch.nn.Linear(1, 1)))
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    samples = torch.tensor([[1.0], [3.0]]) + 10 * fabric.global_rank
    fabric.backward(model(samples).square().mean())
    optimizer.step()
    optimizer.zero_grad()
fabric.print("lightning", lightning.__version__)
