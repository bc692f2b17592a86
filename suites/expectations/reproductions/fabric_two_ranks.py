"""Fabric 2.6.6, two ranks: the ranks' shares are filled up, and the ranks draw the same random numbers.

Prints a mean over four samples although there are three, and the same random number on both ranks.
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
    "lightning", lightning.__version__, f"- mean loss of 3 samples: 2; of {int(count)} samples: {total / count}"
)
print(f"rank {fabric.global_rank} draws {torch.rand(1).item():.4f}")
