"""Transformers 5.23.0, two ranks: the evaluation loss counts samples that fill up the last batch.

Run with torchrun --nproc_per_node 2. Prints 4 for samples with losses 8, 2, 2, 2 and 4. The first sample fills up the
last batch, and the mean of this batch is used as the loss of the fifth sample.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, __version__


class _Model(torch.nn.Linear):
    def forward(self, x, return_loss=True):
        return {"loss": x.mean()}


quiet = {"report_to": "none", "disable_tqdm": True}
cpu = {"use_cpu": True, "ddp_backend": "gloo", "per_device_eval_batch_size": 2}
losses = [8.0, 2.0, 2.0, 2.0, 4.0]
samples = [{"x": torch.tensor([loss])} for loss in losses]
trainer = Trainer(_Model(1, 1), TrainingArguments(tempfile.mkdtemp(), **cpu, **quiet), eval_dataset=samples)
print("transformers", __version__, "- mean", sum(losses) / len(losses), "reported", trainer.evaluate()["eval_loss"])
