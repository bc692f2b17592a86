"""Sentence Transformers 6.2.0 with transformers 5.23.0: every rank writes a checkpoint's model to the same files.

Run with torchrun --nproc_per_node 2. Prints which ranks write; only rank 0 should.
"""

import os
import tempfile

import sentence_transformers
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments


class _Numbers(torch.nn.Linear):
    def preprocess(self, texts, **kwargs):
        return {"input_ids": torch.tensor([[float(text)] for text in texts])}

    def forward(self, batch, _=None):  # as a loss, it gets a list with each column's features
        return super().forward(batch[0]["input_ids"]).mean()

    def save(self, path, *args, **kwargs):
        print("sentence-transformers", sentence_transformers.__version__, "- rank", os.environ["RANK"], "writes")


quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
arguments = SentenceTransformerTrainingArguments(tempfile.mkdtemp(), use_cpu=True, ddp_backend="gloo", **quiet)
data, model = Dataset.from_dict({"text": [*"13579"] * 8}), SentenceTransformer(modules=[_Numbers(1, 1)], device="cpu")
SentenceTransformerTrainer(model, arguments, data, loss=model[0]).train()
