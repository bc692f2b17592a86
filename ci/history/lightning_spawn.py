"""Lightning that starts a node's ranks itself, as in notebooks and in scripts without a launcher."""

from __future__ import annotations

from plumbline import subject
from plumbline.subjects.lightning_trainer import Adapter, pl


@subject(name="lightning-spawn", backends=["ddp"], launch="node")
def train(job):
    """Train ``job`` with processes spawned by torch.multiprocessing, each of which receives the module."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=job.gpus,
        num_nodes=job.num_nodes,
        strategy=pl.strategies.DDPStrategy(start_method="spawn", process_group_backend=job.comm),
        precision=job.precision,
        max_epochs=job.epochs,
        accumulate_grad_batches=job.accumulate,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Adapter(job))
