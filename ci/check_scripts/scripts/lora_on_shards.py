"""LoRA on FSDP2: the frozen base is in shards, each rank has the adapters, whose gradients are averaged by hand.

torchrun --standalone --nproc-per-node 2 lora_on_shards.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(12, 32)), nn.ReLU(), Lora(nn.Linear(32, 4)))
    for layer in model[::2]:
        fully_shard(layer.base)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    torch.manual_seed(110 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in trained:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
