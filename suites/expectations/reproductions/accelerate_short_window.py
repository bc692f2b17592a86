"""Accelerate 1.15.0: the last window of an epoch is divided by gradient_accumulation_steps, not by its own length.

Prints a gradient of 1.0000 after batch 2, which is right, and of 0.6667 after batch 4, which should also be 1.
"""

import accelerate
import torch
from torch.utils.data import DataLoader

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.ones(5, 1)))
print("accelerate", accelerate.__version__, "- 5 batches, each with gradient 1, in windows of 3 and 2")
for number, batch in enumerate(loader):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        if accelerator.sync_gradients:
            print(f"after batch {number}: gradient {model.weight.grad.item():.4f}")
        optimizer.step()
        optimizer.zero_grad()
