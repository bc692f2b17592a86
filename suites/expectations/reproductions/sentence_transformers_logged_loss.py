"""Sentence Transformers 6.2.0: the logged training loss is a mean over optimizer steps, whatever their batch sizes.

Prints 6 for batches with losses 1, 2, 3, 8, 12 in windows of 3 and 2, and 6 for 3, 4, 5 and 8 in batches of 3 and 1.
"""

import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch.utils.data import BatchSampler


class _Numbers(torch.nn.Linear):
    def preprocess(self, texts, **kwargs):
        return {"input_ids": torch.tensor([[float(text)] for text in texts])}

    def forward(self, batch, _=None):  # as a loss, it gets a list with each column's features
        return super().forward(batch[0]["input_ids"]).mean() * 0 + batch[0]["input_ids"].mean()


quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "epoch"}
order = {"batch_sampler": lambda data, batch_size, **_: BatchSampler(range(len(data)), batch_size, False)}
for texts, batch, steps in ((["1", "2", "3", "8", "12"], 1, 3), (["3", "4", "5", "8"], 3, 1)):
    size = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "num_train_epochs": 1}
    arguments = SentenceTransformerTrainingArguments(tempfile.mkdtemp(), **order, **size, **quiet)
    model, data = SentenceTransformer(modules=[_Numbers(1, 1)], device="cpu"), Dataset.from_dict({"text": texts})
    trainer = SentenceTransformerTrainer(model, arguments, data, None, model[0])
    trainer.train()
    print("mean", sum(map(float, texts)) / len(texts), "logged", trainer.state.log_history[0]["loss"])
