"""DistributedSampler shuffles by seed + epoch: without set_epoch, every epoch has the first one's order.

Prints the samples of rank 0 in three epochs, as in the tutorial, and then with set_epoch.
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler

data = list(range(12))
for told in (False, True):
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=3, shuffle=False, sampler=sampler)
    for epoch in range(3):
        if told:
            sampler.set_epoch(epoch)
        print("with set_epoch," if told else "as published,", f"epoch {epoch}:", torch.cat(list(loader)).tolist())
