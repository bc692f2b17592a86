"""A fit in float64 by LBFGS, whose closure runs the model several times in one step.

python float64_lbfgs.py
"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
y = torch.sin(3 * x)
model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    print(f"loss {loss.item()!r}")
    return loss


for _ in range(4):
    optimizer.step(closure)
