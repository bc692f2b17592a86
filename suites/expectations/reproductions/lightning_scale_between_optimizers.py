"""Lightning 2.6.6, float16: if two optimizers step after one backward, the second one's gradient is doubled.

The first one's gradient is infinite, so the GradScaler lowers its scale before the second one's gradient is unscaled.
"""

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _Model(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        self.manual_backward((self.a * batch + self.b).sum())
        for optimizer in self.optimizers():
            optimizer.step()
        print(f"a moved by {self.a.item():.2f}, b by {self.b.item():.2f}")

    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.a, self.b)]


print("lightning", lightning.__version__, "- gradients of a and b are infinite and 1, the learning rate is 1")
model, half, data = _Model(), MixedPrecision("16-mixed", "cpu"), DataLoader(torch.tensor([[float("inf")]]))
model.automatic_optimization = False
model.a, model.b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
lightning.Trainer(max_epochs=1, accelerator="cpu", plugins=[half], **QUIET).fit(model, data)
