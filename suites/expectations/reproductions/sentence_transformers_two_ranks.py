"""Sentence Transformers 6.2.0, several ranks: incomplete batches are dropped, and ranks draw the same random numbers.

Run with torchrun --nproc_per_node 2. Trains on 4 of the 5 samples. Evaluates 4, but counts only the first rank's.
"""

import os
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments


class _Numbers(torch.nn.Linear):
    def preprocess(self, texts, **kwargs):
        return {"input_ids": torch.tensor([[float(text)] for text in texts])}

    def forward(self, batch, _=None):  # as a loss, it gets a list with each column's features
        x = batch[0]["input_ids"]
        print(f"rank {os.environ['RANK']} training={model.training} {x.flatten().tolist()} {torch.rand(1).item():.4f}")
        return super().forward(x).mean() * 0 + x.mean()


quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
cpu = {"use_cpu": True, "ddp_backend": "gloo", "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
arguments = SentenceTransformerTrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, **cpu, **quiet)
data, model = Dataset.from_dict({"text": [*"13579"]}), SentenceTransformer(modules=[_Numbers(1, 1)], device="cpu")
trainer = SentenceTransformerTrainer(model, arguments, data, data, model[0])
trainer.train()
print("eval_loss", trainer.evaluate()["eval_loss"])
