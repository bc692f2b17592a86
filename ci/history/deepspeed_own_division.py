"""DeepSpeed with a loop that divides the loss itself, like Accelerate and transformers' Trainer."""

from __future__ import annotations

from plumbline import subject
from plumbline.subjects.deepspeed_trainer import fit


@subject(
    name="deepspeed-own-division", backends=["ddp", "zero", "zero2", "fsdp"], capabilities=["accumulation"],
    library="deepspeed", buffers="per-rank",
)  # fmt: skip
def train(job):
    """Train ``job`` with ``scale_wrt_gas=False``, so that the engine does not divide."""
    fit(job, backward=lambda engine, loss: engine.backward(loss / job.accumulate, scale_wrt_gas=False))
