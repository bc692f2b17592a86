"""Muon that shares its work: each rank orthogonalises every other matrix, and the ranks exchange the updates.

torchrun --standalone --nproc-per-node 2 muon.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def orthogonal(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            updates = [torch.zeros_like(p) for p in params]
            for i, p in enumerate(params):
                if i % world == rank:
                    state = self.state[p]
                    buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad)
                    updates[i] = orthogonal(p.grad.add(buffer, alpha=group["momentum"]))
            for p, update in zip(params, updates, strict=True):
                dist.all_reduce(update)
                p.add_(update, alpha=-group["lr"])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    muon = Muon([p for p in net.parameters() if p.dim() == 2])
    adam = torch.optim.AdamW([p for p in net.parameters() if p.dim() < 2], lr=1e-3)
    torch.manual_seed(40 + rank)
    for step in range(5):
        x, y = torch.randn(8, 12), torch.randint(0, 4, (8,))
        loss = nn.functional.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
