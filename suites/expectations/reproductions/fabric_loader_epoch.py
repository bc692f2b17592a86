"""Fabric 2.6.6: the first iteration of a loader has the order of epoch 0, even if its sampler is set to another epoch.

Prints the samples of epochs 0 and 1 of one loader. It then sets another loader's sampler to epoch 1, as a resumed
training does, and prints its samples: they are those of epoch 0.
"""

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

fabric = lightning.Fabric(accelerator="cpu", devices=1)


def loader():
    data = torch.arange(8)
    return fabric.setup_dataloaders(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))


whole, resumed = loader(), loader()
resumed.sampler.set_epoch(1)
for name, one in {"epoch 0": whole, "epoch 1": whole, "resumed in epoch 1": resumed}.items():
    print("lightning", lightning.__version__, name, [int(batch) for batch in one])
