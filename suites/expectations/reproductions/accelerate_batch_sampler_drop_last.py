"""Accelerate 1.15.0: gather_for_metrics truncates the last batch although the batch sampler drops the remainder.

Run with torchrun --nproc_per_node 2. Prints that one of four gathered samples is kept.
"""

import accelerate
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

accelerator = accelerate.Accelerator(cpu=True)
data = torch.arange(5.0)
batches = BatchSampler(SequentialSampler(data), batch_size=2, drop_last=True)
for batch in accelerator.prepare(DataLoader(data, batch_sampler=batches)):
    gathered, kept = accelerator.gather(batch), accelerator.gather_for_metrics(batch)
    print("accelerate", accelerate.__version__, "- gathered", gathered.tolist(), "- kept", kept.tolist())
