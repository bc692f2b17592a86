"""A GAN on processes of mp.spawn: two models in DDP, two optimizers, spectral normalisation, one detached pass.

python gan_spawn.py
"""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm

NOISE = 6


def train(rank, world_size, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    generator = DDP(nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 8)))
    critic = DDP(
        nn.Sequential(spectral_norm(nn.Linear(8, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1)), broadcast_buffers=False
    )
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    torch.manual_seed(100 + rank)
    for step in range(4):
        real = torch.randn(16, 8) + 2.0
        fake = generator(torch.randn(16, NOISE))

        d_optimizer.zero_grad()
        scores = critic(torch.cat([real, fake.detach()]))
        d_loss = bce(scores, torch.cat([torch.ones(16, 1), torch.zeros(16, 1)]))
        d_loss.backward()
        d_optimizer.step()

        g_optimizer.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        g_loss = bce(critic.module(fake), torch.ones(16, 1))
        g_loss.backward()
        g_optimizer.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        print(f"rank {rank} step {step} loss {d_loss.item()!r} {g_loss.item()!r}", flush=True)
    del generator, critic
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(train, args=(2, port), nprocs=2)
