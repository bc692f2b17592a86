"""bf16 autocast on one device, gradients clipped by value, two parameter groups, accumulation over two batches.

python bf16_clip_value.py
"""

import torch
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(nn.Conv1d(4, 16, 3, padding=1), nn.GELU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16 * 20, 6))
decayed = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.Adam(
    [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0, "lr": 1e-2}], lr=2e-3
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[4e-3, 2e-2], total_steps=6)

for step in range(5):
    optimizer.zero_grad()
    for micro in range(2):
        x, y = torch.randn(8, 4, 20), torch.randint(0, 6, (8,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y) / 2
        loss.backward()
        print(f"step {step}.{micro} loss {loss.item()!r}")
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    optimizer.step()
    scheduler.step()
