"""Trains a small Llama with Transformers and Plumbline's callback. With an argument, gradients are never zeroed."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import plumbline

torch.manual_seed(0)
shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
if len(sys.argv) > 1:
    torch.optim.AdamW.zero_grad = lambda *arguments, **options: None
    torch.nn.Module.zero_grad = lambda *arguments, **options: None
tokens = torch.randint(64, (64, 12), generator=torch.Generator().manual_seed(1))
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": one, "labels": one} for one in tokens]
    Trainer(model, arguments, train_dataset=data, callbacks=[plumbline.TransformersCallback(3)]).train()
torch.distributed.destroy_process_group()  # otherwise torch aborts one process in a hundred at exit
