"""DeepSpeed under a loop that divides the loss by itself, as Accelerate and transformers' Trainer do."""

from __future__ import annotations

from plumbline import subject
from plumbline.subjects.deepspeed_trainer import fit


@subject(
    name="deepspeed-own-division", backends=["ddp", "zero", "zero2", "fsdp"], capabilities=["accumulation"],
    library="deepspeed", buffers="per-rank",
)  # fmt: skip
def train(job):
    """Train ``job`` with ``scale_wrt_gas=False``: the engine is asked not to divide."""
    fit(job, backward=lambda engine, loss: engine.backward(loss / job.accumulate, scale_wrt_gas=False))
