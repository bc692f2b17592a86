"""A denoiser that draws its own noise and times inside the forward pass, in float64 schedules, with a running average.

torchrun --standalone --nproc-per-node 2 diffusion.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Denoiser(nn.Module):
    def __init__(self, steps=100):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 8))
        self.register_buffer("kept", torch.linspace(0.999, 0.01, steps, dtype=torch.float64).float())

    def forward(self, x):
        t = torch.randint(0, len(self.kept), (len(x),))
        noise = torch.randn_like(x)
        kept = self.kept[t, None]
        mixed = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return nn.functional.mse_loss(self.net(torch.cat([mixed, t[:, None] / len(self.kept)], 1)), noise)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Denoiser())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for step in range(4):
        loss = model(torch.randn(16, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model.module)
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
