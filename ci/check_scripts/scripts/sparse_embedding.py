"""A large embedding with sparse gradients and SparseAdam, the rest with Adagrad: two optimizers in one step.

torchrun --standalone --nproc-per-node 2 sparse_embedding.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(500, 16, mode="mean", sparse=True)
        self.score = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids):
        return self.score(self.items(ids)).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Recommender())
    sparse = torch.optim.SparseAdam(model.module.items.parameters(), lr=0.01)
    dense = torch.optim.Adagrad(model.module.score.parameters(), lr=0.05)
    torch.manual_seed(30 + rank)
    for step in range(4):
        ids = torch.randint(0, 500, (16, 5))
        clicked = (ids.sum(1) % 2).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), clicked)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
