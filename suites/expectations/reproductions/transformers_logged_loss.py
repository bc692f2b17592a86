"""Transformers 5.23.0: the logged training loss is a mean over optimizer steps, whatever their batch sizes.

Prints 6 for 5 batches with losses 1, 2, 3, 8 and 12 in windows of 3 and 2: the mean of 2 and 10. Without accumulation,
it is the mean of 4 and 8, where the last batch has one sample. The means over samples are 5.2 and 5.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, __version__


class _Model(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).mean() * 0 + x.mean()}


quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "epoch"}
loop = {"use_cpu": True, "num_train_epochs": 1, "train_sampling_strategy": "sequential"}
for losses, batch, steps in (([1.0, 2.0, 3.0, 8.0, 12.0], 1, 3), ([3.0, 4.0, 5.0, 8.0], 3, 1)):
    size = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    samples = [{"x": torch.tensor([loss])} for loss in losses]
    arguments = TrainingArguments(tempfile.mkdtemp(), **loop, **size, **quiet)
    trainer = Trainer(_Model(1, 1), arguments, train_dataset=samples)
    trainer.train()
    logged = trainer.state.log_history[0]["loss"]
    print("transformers", __version__, "- mean", sum(losses) / len(losses), "logged", logged)
