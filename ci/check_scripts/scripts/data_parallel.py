"""nn.DataParallel with a weight-normalised layer and a learning rate that is set by hand.

python data_parallel.py
"""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(0)
model = nn.DataParallel(nn.Sequential(weight_norm(nn.Linear(7, 21)), nn.ReLU(), nn.Linear(21, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)
    x = torch.randn(24, 7)
    loss = nn.functional.multi_margin_loss(model(x), (x[:, 0] > 0).long())
    model.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
