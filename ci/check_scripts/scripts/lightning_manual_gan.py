"""Lightning with manual optimization: two networks in one module, two optimizers, toggled in turn.

python lightning_manual_gan.py
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 6))
        self.critic = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

    def forward(self, noise):
        return self.generator(noise)

    def training_step(self, batch, index):
        (real,) = batch
        g_optimizer, d_optimizer = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        bce = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(g_optimizer)
        g_loss = bce(self.critic(self(torch.randn(len(real), 4))), ones)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)

        self.toggle_optimizer(d_optimizer)
        fake = self(torch.randn(len(real), 4)).detach()
        d_loss = (bce(self.critic(real), ones) + bce(self.critic(fake), zeros)) / 2
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)
        print(f"batch {index} loss {g_loss.item()!r} {d_loss.item()!r}", flush=True)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        )


if __name__ == "__main__":
    lightning.seed_everything(2)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Gan(), DataLoader(TensorDataset(torch.randn(64, 6) + 1), batch_size=16))
