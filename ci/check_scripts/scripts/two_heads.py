"""Two tasks on one trunk, each with a backward pass of its own before one optimizer step.

python two_heads.py
"""

import torch
from torch import nn


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.age, self.kind = nn.Linear(32, 1), nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.body(x)
        return {"age": self.age(hidden), "kind": self.kind(hidden)}


torch.manual_seed(0)
model = Trunk()
optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
for step in range(4):
    x = torch.randn(16, 8)
    out = model(x)
    age = nn.functional.mse_loss(out["age"], x.sum(1, keepdim=True))
    kind = nn.functional.cross_entropy(out["kind"], x[:, :4].argmax(1))
    optimizer.zero_grad()
    age.backward(retain_graph=True)
    (0.5 * kind).backward()
    optimizer.step()
    print(f"step {step} loss {age.item()!r} {kind.item()!r}")
