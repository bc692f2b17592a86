"""Transformers 5.23.0: the Trainer fills up the last batch, and its ranks draw the same random numbers.

Run with torchrun --nproc_per_node 2. One sample is left for the second batch; samples of the first batch fill it up.
Both ranks print the same random numbers.
"""

import os
import tempfile

import torch
from transformers import Trainer, TrainingArguments, __version__


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        print(f"rank {os.environ['RANK']}: samples {x.flatten().int().tolist()}, rand {torch.rand(1).item():.4f}")
        return {"loss": self.layer(x).mean()}


print("transformers", __version__, "- 9 samples, batches of 4 a rank")
quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
cpu = {"use_cpu": True, "ddp_backend": "gloo", "per_device_train_batch_size": 4, "num_train_epochs": 1, "seed": 7}
samples = [{"x": torch.tensor([float(number)])} for number in range(9)]
Trainer(_Model(), TrainingArguments(tempfile.mkdtemp(), **cpu, **quiet), train_dataset=samples).train()
