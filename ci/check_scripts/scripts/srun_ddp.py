"""DDP whose rank and world size come from SLURM.

srun --ntasks 2 python srun_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    job = int(os.environ["SLURM_JOB_ID"])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{20000 + job % 10000}", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for step in range(4):
        x = torch.randn(16, 6)
        loss = (model(x) - x.prod(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
