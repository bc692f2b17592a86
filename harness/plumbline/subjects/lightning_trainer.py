"""Lightning's Trainer: its strategies, samplers, precision plugins, accumulation and clipping."""

from itertools import zip_longest

import torch
from torch.utils.data import DataLoader

from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.subjects.released import installed_by

with installed_by("pip install lightning"):
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError:
        import pytorch_lightning as pl  # the same trainer in its own package


class Adapter(pl.LightningModule):
    """The job as a LightningModule."""

    def __init__(self, job):
        super().__init__()
        self.job, self.model = job, job.model()
        self.optimizer_count = len(job.optimizers(self.parameters()))
        self.automatic_optimization = self.optimizer_count == 1  # the module itself steps several optimizers

    def training_step(self, batch, batch_idx):
        loss = self._logged("loss", batch)
        if not self.automatic_optimization:
            self._optimize(loss, batch_idx)
        return loss

    def _optimize(self, loss, batch_idx):
        # With several optimizers, the Trainer leaves accumulation, clipping and schedules to the module.
        place = batch_idx % self.job.accumulate
        window = min(self.job.accumulate, self.trainer.num_training_batches - (batch_idx - place))
        self.manual_backward(loss / window)
        if place < window - 1:
            return
        if self.job.clip_norm is not None:  # each optimizer unscales its gradients as it steps
            torch.nn.utils.clip_grad_norm_(self.parameters(), self.job.clip_norm * self._scale())
        for optimizer, scheduler in zip_longest(self.optimizers(), self.lr_schedulers() or []):
            scale = self._scale()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and self._scale() >= scale:  # not after a skipped step
                scheduler.step()

    def _scale(self):
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    def validation_step(self, batch, batch_idx):
        self._logged("val_loss", batch)

    def on_train_epoch_end(self):
        self.job.log("loss", self.trainer.callback_metrics["loss"])

    def on_validation_epoch_end(self):
        self.job.log("val_loss", self.trainer.callback_metrics["val_loss"])

    def _logged(self, name, batch):
        loss = self.job.loss(self.model(batch), batch)
        self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["index"]))
        return loss

    def configure_optimizers(self):
        return [self._scheduled(optimizer) for optimizer in self.job.optimizers(self.parameters())]

    def _scheduled(self, optimizer):
        scheduler = self.job.scheduler(optimizer)
        schedule = {} if scheduler is None else {"lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        return {"optimizer": optimizer, **schedule}

    def train_dataloader(self):
        return DataLoader(self.job.dataset, batch_size=self.job.batch_size, shuffle=self.job.shuffle)

    def val_dataloader(self):
        return DataLoader(self.job.val_dataset, batch_size=self.job.batch_size) if self.job.validate_every else []


@subject(
    name="lightning",
    backends=["none", "ddp"],
    precisions={one: ["64", "32", "16", "bf16"] for one in ("cuda", "cpu")},
    capabilities=CAPABILITIES,
    library=pl.__name__.partition(".")[0],
)
def train(job):
    fit(job, Adapter(job))


def fit(job, module):
    pl.seed_everything(job.seed, workers=True)
    trainer = pl.Trainer(
        accelerator="gpu" if job.accelerator == "cuda" else "cpu",
        devices=job.gpus,
        num_nodes=job.num_nodes,
        strategy=_strategy(job),
        **_precision(job),
        max_epochs=job.epochs,
        max_steps=(job.stop_after_step or 0) * module.optimizer_count or -1,  # counts the steps of all optimizers
        accumulate_grad_batches=job.accumulate if module.automatic_optimization else 1,
        gradient_clip_val=job.clip_norm if module.automatic_optimization else None,
        val_check_interval=job.validate_every,
        num_sanity_val_steps=0,
        callbacks=_checkpoints(job, module),
        enable_checkpointing=job.stop_after_step is not None,
        # These only cost time.
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=f"{job.checkpoint_dir}/checkpoint.ckpt" if job.resume else None)


def _checkpoints(job, module):
    if job.stop_after_step is None:
        return []
    steps = job.stop_after_step * module.optimizer_count
    return [pl.callbacks.ModelCheckpoint(job.checkpoint_dir, "checkpoint", every_n_train_steps=steps)]


def _strategy(job):
    if job.backend == "none":
        return "auto"
    return pl.strategies.DDPStrategy(process_group_backend=job.comm, find_unused_parameters=job.unused_parameters)


def _precision(job):
    # On a CPU, the flag "16-mixed" would mean bfloat16.
    if job.precision == "16" and job.accelerator == "cpu":
        plugin = getattr(pl.plugins, "MixedPrecision", None) or pl.plugins.MixedPrecisionPlugin  # as before 2.1
        return {"plugins": [plugin("16-mixed", "cpu")]}
    return {"precision": job.precision}
