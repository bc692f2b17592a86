"""A loss scale that grows with a global counter inside the forward pass: it is not a function of its inputs.

python global_counter.py
"""

import torch
from torch import nn

CALLS = 0


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):
        global CALLS
        CALLS += 1
        return self.net(x) * min(1.0, 0.2 * CALLS)


torch.manual_seed(0)
model = Annealed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(16, 6)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
