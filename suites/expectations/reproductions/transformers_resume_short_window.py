"""Transformers 4.56.2: training that resumes within an epoch with a short last window ends too early.

Training saves a checkpoint at step 7 of 10. The resumed training ends at step 9.
"""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, __version__

QUIET = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}


class _Model(torch.nn.Linear):
    def forward(self, x):
        seen.append(int(x))
        return {"loss": super().forward(x).mean()}


folder, samples = tempfile.mkdtemp(), [{"x": torch.tensor([float(number)])} for number in range(9)]
loop = {"use_cpu": True, "per_device_train_batch_size": 1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
print("transformers", __version__, "- 9 batches in windows of 2: 5 steps an epoch, 2 epochs, saved at step 7")
for steps, resume in ((7, False), (-1, True)):
    seen = []
    trainer = Trainer(
        _Model(1, 1), TrainingArguments(folder, max_steps=steps, save_steps=7, **loop, **QUIET), train_dataset=samples
    )
    trainer.train(resume_from_checkpoint=resume)
    print("resumed:" if resume else "begun:", f"up to step {trainer.state.global_step}, {len(seen)} batches: {seen}")
