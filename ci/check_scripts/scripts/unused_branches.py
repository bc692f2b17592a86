"""Each batch uses one of the experts, and none uses the auxiliary head: find_unused_parameters.

torchrun --standalone --nproc-per-node 2 unused_branches.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 20)
        self.experts = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.head = nn.Linear(20, 1)
        self.auxiliary = nn.Linear(20, 5)

    def forward(self, x, expert):
        return self.head(torch.relu(self.experts[expert](torch.relu(self.stem(x)))))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(20 + rank)
    for step in range(5):
        x = torch.randn(8, 10)
        loss = nn.functional.mse_loss(model(x, (step + rank) % 3), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
