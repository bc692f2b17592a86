"""A small custom trainer around Lightning Fabric, for a LightningModule.

Written anew after Lightning-AI/pytorch-lightning, examples/fabric/build_your_own_trainer/trainer.py (Apache-2.0): the
same structure, and the same calls in the same order. Left out: progress bars, monitored values, limits.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from lightning.fabric import Fabric


class MyCustomTrainer:
    """Trains a LightningModule, evaluates it after an epoch, and saves a checkpoint."""

    def __init__(
        self,
        accelerator="auto",
        strategy="auto",
        devices="auto",
        precision="32-true",
        callbacks=None,
        max_epochs=1000,
        max_steps=None,
        grad_accum_steps=1,
        validation_frequency=1,
        use_distributed_sampler=True,
        checkpoint_dir="./checkpoints",
    ):
        self.fabric = Fabric(
            accelerator=accelerator, strategy=strategy, devices=devices, precision=precision, callbacks=callbacks
        )
        self.global_step = 0
        self.grad_accum_steps = grad_accum_steps
        self.current_epoch = 0
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.should_stop = False
        self.validation_frequency = validation_frequency
        self.use_distributed_sampler = use_distributed_sampler
        self.checkpoint_dir = checkpoint_dir

    def fit(self, model, train_loader, val_loader):
        """Train ``model``; ``configure_optimizers`` returns a list with an optimizer and a list with a schedule."""
        self.fabric.launch()
        train_loader = self.fabric.setup_dataloaders(train_loader, use_distributed_sampler=self.use_distributed_sampler)
        if val_loader is not None:
            val_loader = self.fabric.setup_dataloaders(val_loader, use_distributed_sampler=self.use_distributed_sampler)

        optimizers, schedulers = model.configure_optimizers()
        optimizer, scheduler_cfg = optimizers[0], schedulers[0] if schedulers else None
        model, optimizer = self.fabric.setup(model, optimizer)
        state = {"model": model, "optim": optimizer}

        while not self.should_stop:
            self.train_loop(model, optimizer, train_loader, scheduler_cfg)
            if val_loader is not None and self.current_epoch % self.validation_frequency == 0:
                self.val_loop(model, val_loader)
            self.step_scheduler(model, scheduler_cfg, "epoch", self.current_epoch)
            self.current_epoch += 1
            if self.max_epochs is not None and self.current_epoch >= self.max_epochs:
                self.should_stop = True
            self.save(state)
        self.should_stop = False

    def train_loop(self, model, optimizer, train_loader, scheduler_cfg):
        """Train for an epoch."""
        self.fabric.call("on_train_epoch_start")
        for batch_idx, batch in enumerate(train_loader):
            if self.should_stop:
                break
            self.fabric.call("on_train_batch_start", batch, batch_idx)

            should_optim_step = self.global_step % self.grad_accum_steps == 0
            if should_optim_step:
                self.fabric.call("on_before_optimizer_step", optimizer)
                optimizer.step(partial(self.training_step, model=model, batch=batch, batch_idx=batch_idx))
                self.fabric.call("on_before_zero_grad", optimizer)
                optimizer.zero_grad()
            else:
                self.training_step(model=model, batch=batch, batch_idx=batch_idx)

            self.fabric.call("on_train_batch_end", None, batch, batch_idx)
            if should_optim_step:
                self.step_scheduler(model, scheduler_cfg, "step", self.global_step)
            self.global_step += int(should_optim_step)
            if self.max_steps is not None and self.global_step >= self.max_steps:
                self.should_stop = True
                break
        self.fabric.call("on_train_epoch_end")

    def val_loop(self, model, val_loader):
        """Evaluate."""
        model.eval()
        torch.set_grad_enabled(False)
        for batch_idx, batch in enumerate(val_loader):
            model.validation_step(batch, batch_idx)
        model.train()
        torch.set_grad_enabled(True)

    def training_step(self, model, batch, batch_idx):
        """Run a batch's forward and backward; called by the optimizer's step, or alone between steps."""
        outputs = model.training_step(batch, batch_idx=batch_idx)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]
        self.fabric.call("on_before_backward", loss)
        self.fabric.backward(loss)
        self.fabric.call("on_after_backward")
        return loss

    def step_scheduler(self, model, scheduler_cfg, level, current_value):
        """Step the scheduler if it is of this level and due."""
        if scheduler_cfg is None or scheduler_cfg["interval"] != level:
            return
        if current_value % scheduler_cfg["frequency"] == 0:
            model.lr_scheduler_step(scheduler_cfg["scheduler"], None)

    def save(self, state):
        """Save the model, the optimizer and the progress."""
        state |= {"global_step": self.global_step, "current_epoch": self.current_epoch}
        self.fabric.save(os.path.join(self.checkpoint_dir, f"epoch-{self.current_epoch:04d}.ckpt"), state)
