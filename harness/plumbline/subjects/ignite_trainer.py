"""PyTorch-Ignite: its supervised trainer with ``ignite.distributed``'s model, optimizer and dataloader."""

import gc

import torch

from plumbline.subjects.declare import subject
from plumbline.subjects.released import ddp_options, installed_by

with installed_by("pip install pytorch-ignite"):
    import ignite.distributed as idist
    from ignite.contrib.engines import common
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver
    from ignite.metrics import Loss
    from ignite.utils import convert_tensor, manual_seed

CAPABILITIES = [
    "accumulation", "scheduler", "validation", "checkpoint", "metrics",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip

CHECKPOINT = "checkpoint.pt"


@subject(
    name="ignite",
    backends=["none", "ddp"],
    precisions={"cuda": ["64", "32", "16"], "cpu": ["64", "32"]},  # amp_mode casts only on CUDA
    capabilities=CAPABILITIES,
    library="pytorch-ignite",
)
def train(job):
    with idist.Parallel(backend=job.comm if job.world_size > 1 else None) as parallel:
        parallel.run(_training, job)
        gc.collect()  # a DistributedDataParallel that outlives its process group can hang (torch 2.13)


def _training(local_rank, job):
    manual_seed(job.seed + idist.get_rank())
    bare = job.model()
    model = idist.auto_model(bare, **ddp_options(job))
    optimizer = idist.auto_optim(job.optimizer(bare.parameters()))
    # Ignite takes the global batch size.
    loader = idist.auto_dataloader(job.dataset, batch_size=job.global_batch_size, shuffle=job.shuffle)
    val_loader = idist.auto_dataloader(job.val_dataset, batch_size=job.global_batch_size, shuffle=False)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        job.loss,
        device=job.device,
        prepare_batch=_inputs_and_targets,
        output_transform=lambda x, y, outputs, loss: (loss.detach(), _count(y)),
        amp_mode="amp" if job.precision == "16" else None,
        scaler=job.precision == "16",
        gradient_accumulation_steps=job.accumulate,
        deterministic=True,  # allows resuming within an epoch
    )
    evaluator = create_supervised_evaluator(model, device=job.device, prepare_batch=_inputs_and_targets)
    sampler = loader.sampler if job.world_size > 1 else None
    # Continue even if the loss is not finite.
    common.setup_common_training_handlers(trainer, train_sampler=sampler, with_pbars=False, stop_on_nan=False)
    parts = {"trainer": trainer, "model": model, "optimizer": optimizer}
    if job.precision == "16":
        parts["scaler"] = trainer.state.scaler
    scheduler = job.scheduler(optimizer)
    if scheduler is not None:
        parts["scheduler"] = scheduler
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.accumulate), lambda: scheduler.step())
    _report(job, "loss", trainer, Loss(lambda loss, count: loss, batch_size=lambda count: count))
    if job.validate_every:

        def due(engine, iteration):
            return ((iteration - 1) % len(loader) + 1) % job.validate_every == 0

        _report(job, "val_loss", evaluator, Loss(job.loss, batch_size=_count))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(event_filter=due), lambda: evaluator.run(val_loader))
    if job.stop_after_step:
        stop = Events.ITERATION_COMPLETED(once=job.stop_after_step * job.accumulate)
        disk = DiskSaver(job.checkpoint_dir, require_empty=False)
        trainer.add_event_handler(stop, Checkpoint(parts, disk, filename_pattern=CHECKPOINT))
        trainer.add_event_handler(stop, lambda: trainer.terminate())
    if job.resume:
        # Given a file name, load_objects would refuse the generator states that Ignite itself saved.
        Checkpoint.load_objects(parts, torch.load(f"{job.checkpoint_dir}/{CHECKPOINT}", weights_only=False))
    trainer.run(loader, max_epochs=job.epochs)


def _report(job, name, engine, metric):
    metric.attach(engine, name)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: job.log(name, engine.state.metrics[name]))


def _inputs_and_targets(batch, device, non_blocking):
    batch = convert_tensor(batch, device=device, non_blocking=non_blocking)
    return batch, batch


def _count(batch):
    return len(batch["index"])
