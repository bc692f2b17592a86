"""Lightning 2.6.6, ddp: a validation loss logged with sync_dist=True counts the samples that pad the ranks' shares.

Prints 2.5 for samples with losses 4, 1 and 1; the first one fills up the second rank's share.
"""

import lightning
import torch
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        return (self.weight * batch).mean() * 0

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.weight * batch).mean(), on_epoch=True, sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model, data = _Model(), DataLoader(torch.tensor([[4.0], [1.0], [1.0]]))
model.weight = torch.nn.Parameter(torch.ones(1))
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", num_sanity_val_steps=0, **QUIET)
trainer.fit(model, data, data)
print("lightning", lightning.__version__, "- mean loss 2; val_loss", trainer.callback_metrics["val_loss"].item())
