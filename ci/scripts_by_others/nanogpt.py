"""nanoGPT's training loop under test."""

from __future__ import annotations

import torch
import train_gpt

from plumbline import subject

DTYPES = {"64": "float32", "32": "float32", "bf16": "bfloat16", "16": "float16"}
CAPABILITIES = ["accumulation", "clipping"]


@subject(name="nanogpt", backends=["ddp"], precisions=list(DTYPES), capabilities=CAPABILITIES, data="iterations")
def train(job, script=train_gpt):
    """Replace the script's settings, data, model and optimizer with the job's."""

    def get_batch():
        batch = job.dataset.batch(torch.randint(len(job.dataset), (job.batch_size,)))
        return batch.to(job.device), batch

    script.device, script.backend, script.dtype = str(job.device), job.comm, DTYPES[job.precision]
    script.gradient_accumulation_steps = job.accumulate * job.world_size
    script.grad_clip, script.max_iters = job.clip_norm or 0.0, job.steps - 1
    model = job.model_with_loss()
    optimizer = job.optimizer(model.parameters())
    script.learning_rate = optimizer.param_groups[0]["lr"]
    model.forward = lambda X, Y, call=model.forward: call(**X)[::-1]  # noqa: N803 (logits, loss)
    script.get_batch, script.make_model, script.configure_optimizers = get_batch, lambda: model, lambda model: optimizer
    script.train()
