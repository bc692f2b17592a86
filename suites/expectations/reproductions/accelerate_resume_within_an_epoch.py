"""Accelerate 1.15.0: training that resumes within an epoch skips batches of another order.

Run with torchrun --nproc_per_node 2. Training resumes in epoch 1 as the checkpointing guide shows. It prints another
batch 1 than the uninterrupted training.
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
folder, rank = broadcast_object_list([tempfile.mkdtemp()])[0], accelerator.process_index
for resumed in (False, True):
    accelerator.free_memory()  # forget prepared objects
    set_seed(7)
    samples = DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), samples)
    if resumed:
        accelerator.load_state(folder)
        for batch in accelerator.skip_first_batches(loader, 1):
            print(f"rank {rank} resumed, epoch 1, batch 1: {batch.int().tolist()}")
    for epoch in () if resumed else (0, 1):
        for number, batch in enumerate(loader):
            print(f"rank {rank} without a break, epoch {epoch}, batch {number}: {batch.int().tolist()}")
            if (epoch, number) == (1, 0):
                accelerator.save_state(folder)
