"""Lightning 2.6.6, two ranks, manual optimization: DDP broadcasts buffers only before the first forward.

Prints the running mean at the start of each forward. With automatic optimization, it is 0, 0.2 and 0.38 on both ranks.
"""

import lightning
import torch
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        print(f"rank {self.global_rank}: a forward begins with {self.layers[0].running_mean.item():.2f}")
        self.manual_backward(self.layers(batch + 10 * self.global_rank).square().mean())
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


print("lightning", lightning.__version__)
model, data = _Model(), DataLoader(torch.full((12, 1), 2.0), batch_size=2)
model.automatic_optimization, model.layers = False, torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **QUIET).fit(model, data)
