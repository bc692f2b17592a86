"""One half of the model is compiled and has dropout, so it draws its random numbers in compiled code; the other is not.

python half_compiled.py
"""

import torch
from torch import nn

torch.manual_seed(0)
encoder = torch.compile(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 24)))
decoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

for step in range(5):
    x, y = torch.randn(16, 12), torch.randint(0, 4, (16,))
    loss = nn.functional.cross_entropy(decoder(encoder(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
