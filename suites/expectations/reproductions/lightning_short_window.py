"""Lightning 2.6.6: the last window of an epoch is divided by accumulate_grad_batches, not by its own length.

Prints a gradient of 1.0000 after batch 2, which is right, and of 0.6667 after batch 4, which should also be 1.
"""

import lightning
import torch
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        return (self.weight * batch).mean()  # the gradient of a batch is its mean: 1

    def on_before_optimizer_step(self, optimizer):
        print(f"after batch {self.trainer.fit_loop.epoch_loop.batch_idx}: gradient {self.weight.grad.item():.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


print("lightning", lightning.__version__, "- 5 batches, each with gradient 1, in windows of 3 and 2")
model = _Model()
model.weight = torch.nn.Parameter(torch.zeros(1))
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=3, accelerator="cpu", **QUIET)
trainer.fit(model, DataLoader(torch.ones(5, 1)))
