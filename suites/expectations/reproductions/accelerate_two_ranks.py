"""Accelerate 1.15.0: a prepared schedule is stepped once per rank, and the last batch is filled up.

Run with torchrun --nproc_per_node 2. In the second batch, it prints a rate that is a quarter of the last, not a half.
One sample is left for this batch; samples of the first batch fill it up.
"""

import accelerate
import torch
from torch.utils.data import DataLoader

accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(torch.arange(9.0).view(9, 1), batch_size=4)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
accelerator.print("accelerate", accelerate.__version__, "- 9 samples, batches of 4 a rank, the rate is halved a step")
for batch in loader:
    accelerator.backward((model(batch) * 0).mean())
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    schedule.step()
    print(f"rank {accelerator.process_index}: samples {batch.flatten().int().tolist()}, rate {rate}")
