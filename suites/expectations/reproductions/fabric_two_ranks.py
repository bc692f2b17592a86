"""Fabric 2.6.6, two ranks: shares are filled up, and ranks draw equal random numbers.

Prints a mean of four samples where there are three, and on both ranks the same random numbers.
"""

import lightning
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(7, verbose=False)
losses = fabric.setup_dataloaders(DataLoader(torch.tensor([4.0, 1.0, 1.0])))
total, count = fabric.all_reduce(sum(torch.cat([loss, torch.ones(1)]) for loss in losses), reduce_op="sum")
fabric.print(
    "lightning", lightning.__version__, f"- mean loss 2 of 3 samples, and of {int(count)} it is {total / count}"
)
print(f"rank {fabric.global_rank} draws {torch.rand(1).item():.4f}")
