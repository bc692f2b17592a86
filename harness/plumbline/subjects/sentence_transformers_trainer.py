"""Sentence Transformers' trainer: a model of one module, and losses that embed a batch or gather embeddings.

The datasets have one column of texts, such as ``train 7`` for sample 7. Instead of tokenizing texts, the model's
preprocessing looks up the samples and returns a batch of the job. If the job's samples are pairs, the loss is the
library's MultipleNegativesRankingLoss, otherwise the job's.
"""

import copy
import os

from torch import nn

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by
from plumbline.workloads.coupling import TEMPERATURE
from plumbline.workloads.dataset import Sample

with installed_by("pip install 'sentence-transformers[train]'"):
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.modules import InputModule
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from torch.utils.data import SequentialSampler

    from plumbline.subjects.transformers_trainer import CAPABILITIES, arguments, fit

PRECISIONS = {"cuda": ["64", "32", "16", "bf16"], "cpu": ["64", "32", "bf16"]}  # float16 on a cpu is refused


class JobEncoder(InputModule):
    """The job's model as the first module of a SentenceTransformer."""

    modalities = ("text",)
    latest = None

    def __init__(self, job):
        super().__init__()
        self.model = job.model()
        self.data = {"train": job.dataset, "val": job.val_dataset}
        JobEncoder.latest = self

    def preprocess(self, inputs, prompt=None, **kwargs):
        part = inputs[0].split()[0]
        batch = self.data[part].batch([int(text.split()[1]) for text in inputs])
        return {"input_ids": batch["index"], **batch}

    def forward(self, features):
        batch = Sample({name: column for name, column in features.items() if name != "input_ids"})
        return {**features, "outputs": self.model(batch), "batch": batch}

    def save(self, output_path, *args, safe_serialization=True, **kwargs):
        self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path, subfolder="", **kwargs):
        return cls.load_torch_weights(model_name_or_path, subfolder, model=copy.deepcopy(cls.latest))


class JobLoss(nn.Module):
    """The job's loss as a module that embeds the batch."""

    def __init__(self, model, job, gather):
        super().__init__()
        self.model, self.job = model, job
        self.pairs = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, gather_across_devices=gather)

    def forward(self, sentence_features, labels):
        features = self.model(sentence_features[0])
        if "views" in features:
            return self.pairs.compute_loss_from_embeddings(list(features["outputs"].unbind(1)), labels)
        return self.job.loss(features["outputs"], features["batch"])


def in_order(dataset, batch_size, drop_last, **kwargs):
    """Return a sampler of batches that does not shuffle, unlike the trainer's own."""
    return DefaultBatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)


DECLARED = {"library": "sentence-transformers", "backends": ["none", "ddp"], "buffers": "per-rank"}


@subject(name="sentence-transformers", precisions=PRECISIONS, capabilities=CAPABILITIES, **DECLARED)
def train(job):
    embed(job)


@subject(name="sentence-transformers-gather", precisions=PRECISIONS, **DECLARED)
def train_gathering(job):
    """Train with ``gather_across_devices=True``, which gathers the pairs of all ranks."""
    embed(job, gather=True)


def embed(job, gather=False):
    if job.world_size == 1:
        # Train without torchrun's variables: in a process group of one rank, the trainer would drop incomplete batches.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    model = SentenceTransformer(modules=[JobEncoder(job)], device=job.device.type)
    optimizer = job.optimizer(model.parameters())
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            **arguments(job), **({} if job.shuffle else {"batch_sampler": in_order})
        ),
        train_dataset=Dataset.from_dict({"text": [f"train {number}" for number in range(len(job.dataset))]}),
        eval_dataset=Dataset.from_dict({"text": [f"val {number}" for number in range(len(job.val_dataset))]}),
        loss=JobLoss(model, job, gather),
        optimizers=(optimizer, job.scheduler(optimizer)),
    )
    fit(job, trainer)
