"""PyTorch-Ignite under test: its supervised trainer over ``ignite.distributed``'s model, optimizer and dataloader."""

from __future__ import annotations

from harness.subjects.declare import subject
from harness.subjects.released import installed_by, where_there_is_cuda

with installed_by("pip install pytorch-ignite"):
    import ignite.distributed as idist
    from ignite.contrib.engines import common
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.utils import convert_tensor, manual_seed

CAPABILITIES = [
    "accumulation", "scheduler", "validation",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip


@subject(
    name="ignite",
    backends=["none", "ddp"],
    precisions=["64", "32", *where_there_is_cuda("16")],  # its amp_mode casts on CUDA alone
    capabilities=CAPABILITIES,
)
def train(job):
    """Train ``job`` with ``create_supervised_trainer`` inside of ``idist.Parallel``."""
    with idist.Parallel(backend=job.comm if job.world_size > 1 else None) as parallel:
        parallel.run(_training, job)


def _training(local_rank, job):
    manual_seed(job.seed + idist.get_rank())
    bare = job.model()
    model = idist.auto_model(bare, **_wrapping(job))
    optimizer = idist.auto_optim(job.optimizer(bare.parameters()))
    # The batch size is that of all processes.
    loader = idist.auto_dataloader(job.dataset, batch_size=job.global_batch_size, shuffle=job.shuffle)
    val_loader = idist.auto_dataloader(job.val_dataset, batch_size=job.global_batch_size, shuffle=False)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        job.loss,
        device=job.device,
        prepare_batch=_inputs_and_targets,
        amp_mode="amp" if job.precision == "16" else None,
        scaler=job.precision == "16",
        gradient_accumulation_steps=job.accumulate,
    )
    evaluator = create_supervised_evaluator(model, device=job.device, prepare_batch=_inputs_and_targets)
    sampler = loader.sampler if job.world_size > 1 else None
    common.setup_common_training_handlers(trainer, train_sampler=sampler, with_pbars=False)
    scheduler = job.scheduler(optimizer)
    if scheduler is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.accumulate), lambda: scheduler.step())
    if job.validate_every:

        def due(engine, iteration):
            return ((iteration - 1) % len(loader) + 1) % job.validate_every == 0

        trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=due), lambda: evaluator.run(val_loader))
    trainer.run(loader, max_epochs=job.epochs)


def _wrapping(job):
    return {"find_unused_parameters": job.unused_parameters} if job.world_size > 1 else {}


def _inputs_and_targets(batch, device, non_blocking):
    batch = convert_tensor(batch, device=device, non_blocking=non_blocking)
    return batch, batch  # the job's model and its loss take what they need of it
