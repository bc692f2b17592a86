"""Trains with Lightning on two ranks and Plumbline's callback. With an argument, gradients are never zeroed."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plumbline


class Classifier(pl.LightningModule):
    """A small classifier; with ``is_wrong``, gradients are never zeroed."""

    def __init__(self, *, is_wrong: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.is_wrong = is_wrong

    def training_step(self, batch, number):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def optimizer_zero_grad(self, *arguments):
        if not self.is_wrong:
            super().optimizer_zero_grad(*arguments)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    data = TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=2,
        callbacks=[plumbline.LightningCallback(3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(is_wrong=len(sys.argv) > 1), DataLoader(data, 4, shuffle=True))
    torch.distributed.destroy_process_group()  # otherwise torch aborts one process in a hundred at exit
