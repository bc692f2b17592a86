"""Lightning Fabric, which starts the second process itself: accumulation without synchronisation, clipping.

python fabric_loop.py
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 2

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(9)
    x = torch.randn(128, 10)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sin().sum(1)), batch_size=8, shuffle=True))
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 1))
    model, optimizer = fabric.setup(model, torch.optim.RMSprop(model.parameters(), lr=1e-3))

    for index, (inputs, target) in enumerate(loader):
        accumulating = (index + 1) % ACCUMULATE != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.smooth_l1_loss(model(inputs).squeeze(1), target)
            fabric.backward(loss / ACCUMULATE)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.2)
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {fabric.global_rank} batch {index} loss {loss.item()!r}", flush=True)
