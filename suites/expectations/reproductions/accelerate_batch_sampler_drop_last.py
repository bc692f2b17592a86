"""Accelerate 1.15.0: gather_for_metrics cuts the last batch of a batch sampler that drops what is left over.

Run by torchrun --nproc_per_node 2, it prints that of four gathered samples one is kept.
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
