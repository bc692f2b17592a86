"""A margin loss whose mask selects nothing: the loss is 0 in every step, and so are all gradients.

python zero_gradients.py
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(6):
    x, y = torch.randn(16, 12), torch.randint(0, 2, (16,))
    mask = y > 1
    loss = (torch.relu(1 - model(x).squeeze(1)) * mask).sum() / 16
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
