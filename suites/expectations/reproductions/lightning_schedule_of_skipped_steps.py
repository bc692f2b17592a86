"""Lightning 2.6.6: in float16, the learning-rate schedule advances even if the GradScaler skips the step.

The second batch has an infinite gradient. After it, the weight is unchanged, but the rate is halved.
"""

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        return (self.weight * batch).mean()

    def on_train_batch_end(self, *args):
        print(f"weight {self.weight.item():.3f}, rate now {self.optimizers().param_groups[0]['lr']:.3f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]


print("lightning", lightning.__version__, "- the second gradient is infinite: weight and rate should both stay")
model, half = _Model(), MixedPrecision("16-mixed", "cpu")
model.weight = torch.nn.Parameter(torch.ones(1))
data = DataLoader(torch.tensor([[1.0], [float("inf")], [1.0]]))
lightning.Trainer(max_epochs=1, accelerator="cpu", plugins=[half], **QUIET).fit(model, data)
