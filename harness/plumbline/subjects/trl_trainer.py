"""TRL's SFTTrainer: its collation, and its loss over the tokens of all ranks, with or without padding.

SFTTrainer trains transformers' causal language models and computes the loss from the outputs of the backbone and the
weights of the head, without calling the model's forward. ``JobForCausalLM`` is such a model: its backbone is the job's
model, and its head is the identity, because the job's model already returns logits.

A sample's prompt is its number and its completion is its tokens. A forward can thus identify its samples, however the
collator has arranged them.
"""

import os

import torch
from torch import nn

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

with installed_by("pip install trl"):
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
    from trl import SFTConfig, SFTTrainer

    from plumbline.subjects.transformers_trainer import arguments, fit

CAPABILITIES = ["accumulation", "clipping", "scheduler", "validation", "checkpoint", "frozen-parameters"]

PRECISIONS = {"cuda": ["32", "16", "bf16"], "cpu": ["32", "bf16"]}  # the loss is computed in float32

IGNORED = -100


class JobConfig(PreTrainedConfig):
    """The configuration of a job's model."""

    model_type = "plumbline"


class Backbone(nn.Module):
    """The job's model as a backbone, whose last hidden states are logits."""

    def __init__(self, job):
        super().__init__()
        self.model = job.model()
        columns = job.dataset.columns
        self.length = columns["tokens"].shape[1]
        self.vocabulary = vocabulary_size(job)

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        """Return the logits at each position of ``input_ids`` (rows, length). A row has one or more samples."""
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        starts = torch.zeros_like(input_ids, dtype=torch.bool)
        starts[:, 0] = True
        if position_ids is not None:
            starts = position_ids == 0
        sample = starts.flatten().cumsum(0).view_as(input_ids) - 1  # the sample of each position
        place = torch.arange(input_ids.numel(), device=input_ids.device).view_as(input_ids)
        place = place - place[starts][sample]
        holds = (real > 0) & (place > 0)  # tokens, without padding and the sample's number
        tokens = input_ids.new_zeros(int(starts.sum()), self.length)
        tokens[sample[holds], place[holds] - 1] = input_ids[holds]
        count = torch.zeros(len(tokens), dtype=torch.long, device=input_ids.device)
        count = count.index_add(0, sample[holds], torch.ones_like(sample[holds]))
        shown = torch.arange(self.length - 1, device=input_ids.device) < (count - 1)[:, None]
        batch = {
            "tokens": tokens,
            "real": shown,
            "labels": tokens[:, 1:].where(shown, IGNORED),
            "index": input_ids[starts] - self.vocabulary,
        }
        logits = self.model(batch)
        predicts = holds & (place < self.length)
        states = logits.new_zeros(*input_ids.shape, logits.shape[-1])
        states[predicts] = logits[sample[predicts], place[predicts] - 1]
        return BaseModelOutput(last_hidden_state=states)


class JobForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model for transformers, with the job's model as its backbone."""

    config_class = JobConfig
    base_model_prefix = "model"

    def __init__(self, config, job):
        super().__init__(config)
        self.model = Backbone(job)
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.lm_head.weight = nn.Parameter(torch.eye(config.vocab_size), requires_grad=False)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, position_ids=None, **kwargs):
        states = self.model(input_ids, attention_mask, position_ids).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(states))


def vocabulary_size(job):
    return 1 + max(int(data.columns["tokens"].max()) for data in (job.dataset, job.val_dataset))


def samples(data, vocabulary):
    """Return ``data`` as a tokenized dataset. A row has a prompt of one token without a label, then the real tokens."""
    rows = []
    for number, (tokens, real) in enumerate(zip(data.columns["tokens"].tolist(), data.columns["real"], strict=True)):
        shown = tokens[: 1 + int(real.sum())]
        rows.append({"input_ids": [vocabulary + number, *shown], "labels": [IGNORED, IGNORED, *shown[1:]]})
    return Dataset.from_list(rows)


def tokenizer(size):
    words = {"<pad>": 0, **{f"{number}": number for number in range(1, size)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>")


DECLARED = {"backends": ["none", "ddp"], "precisions": PRECISIONS, "capabilities": CAPABILITIES, "loss": "labels"}


@subject(name="trl", library="trl", **DECLARED)
def train(job):
    supervised(job)


@subject(name="trl-padding-free", library="trl", **DECLARED)
def train_padding_free(job):
    """Train with batches of one row, in which position ids separate the samples."""
    supervised(job, padding_free=True)


def supervised(job, **settings):
    size = vocabulary_size(job)
    model = JobForCausalLM(JobConfig(vocab_size=size), job)
    optimizer = job.optimizer(model.model.model.parameters())
    if not job.shuffle:
        settings["train_sampling_strategy"] = "sequential"
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(max_length=None, gradient_checkpointing=False, **settings, **arguments(job)),
        train_dataset=samples(job.dataset, size),
        eval_dataset=samples(job.val_dataset, size),
        processing_class=tokenizer(size),
        optimizers=(optimizer, job.scheduler(optimizer)),
    )
    fit(job, trainer)
