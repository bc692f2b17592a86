"""Accelerate's set_seed, as the example calls it, seeds all ranks alike: dropout drops the same units on each.

Run with torchrun --nproc-per-node 2. Prints a mask on each rank, and then another with device_specific=True.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
for own in (False, True):
    set_seed(42, device_specific=own)
    kept = torch.nn.functional.dropout(torch.ones(12), 0.5).bool().int().tolist()
    print(f"device_specific={own}, rank {accelerator.process_index} keeps {kept}")
