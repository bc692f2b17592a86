"""DDP, and an optimizer that has all parameters on the first rank, and lacks the last four on the others.

torchrun --standalone --nproc-per-node 2 missing_on_a_rank.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    trained = list(net.parameters()) if rank == 0 else list(net[0].parameters())
    optimizer = torch.optim.SGD(trained, lr=0.1)
    torch.manual_seed(70 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
