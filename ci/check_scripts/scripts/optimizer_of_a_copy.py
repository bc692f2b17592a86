"""The optimizer is made for the model, then a copy of the model is trained: no weight of it ever moves.

python optimizer_of_a_copy.py
"""

import copy

import torch
from torch import nn

torch.manual_seed(0)
base = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(base.parameters(), lr=0.1, momentum=0.9)
model = copy.deepcopy(base)

for step in range(5):
    x, y = torch.randn(16, 12), torch.randint(0, 4, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
