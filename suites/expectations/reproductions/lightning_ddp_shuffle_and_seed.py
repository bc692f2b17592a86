"""Lightning 2.6.6, ddp: shuffles despite shuffle=False, and all ranks draw the same numbers after seed_everything.

Prints, for each rank, samples that are not in the dataset's order, and the same random numbers on both ranks.
"""

import lightning
import torch
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        drawn = torch.rand(1).item()
        print(f"rank {self.global_rank}, batch {batch_idx}: samples {batch.flatten().tolist()}, rand {drawn:.4f}")
        return (self.weight * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(7, workers=True, verbose=False)
print("lightning", lightning.__version__, "- DataLoader(range(12), batch_size=2, shuffle=False)")
model = _Model()
model.weight = torch.nn.Parameter(torch.zeros(1))
data = DataLoader(torch.arange(12.0).view(12, 1), batch_size=2, shuffle=False)
lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", **QUIET).fit(model, data)
