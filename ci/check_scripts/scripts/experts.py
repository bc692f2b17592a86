"""Experts in parallel: two ranks have two experts each, and exchange tokens by all_to_all; all else is data parallel.

torchrun --standalone --nproc-per-node 2 experts.py
"""

import torch
import torch.distributed as dist
from torch import nn

EXPERTS, WIDTH, CAPACITY = 4, 16, 24
MAX_NORM = 0.5


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx, grad):
        returned = torch.empty_like(grad)
        dist.all_to_all_single(returned, grad.contiguous())
        return returned


class Experts(nn.Module):
    """A router on every rank, and this rank's part of the experts."""

    def __init__(self, local):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(local)
        )

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        gate, chosen = gates.max(-1)
        slots = torch.zeros(EXPERTS, CAPACITY, WIDTH)
        places = []
        for expert in range(EXPERTS):
            rows = (chosen == expert).nonzero().flatten()[:CAPACITY]
            places.append(rows)
            slots = slots.index_put((torch.tensor([expert]), torch.arange(len(rows))), x[rows])
        sent = AllToAll.apply(slots)
        world = dist.get_world_size()
        local = len(self.experts)
        mine = sent.view(world, local, CAPACITY, WIDTH)
        done = torch.stack([one(mine[:, index]) for index, one in enumerate(self.experts)], 1)
        back = AllToAll.apply(done.reshape(EXPERTS, CAPACITY, WIDTH))
        out = torch.zeros_like(x)
        for expert, rows in enumerate(places):
            out = out.index_add(0, rows, back[expert, : len(rows)])
        return out * gate.unsqueeze(-1)


class Model(nn.Module):
    def __init__(self, local):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = Experts(local)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.moe(self.norm(x))
        return self.out(x)


def average_gradients(model, world):
    """Sum and average all gradients but the experts', which already come from the tokens of all ranks."""
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(parameter.grad)
        parameter.grad /= world


def clip_gradients(model):
    experts = [p for n, p in model.named_parameters() if "experts" in n]
    others = [p for n, p in model.named_parameters() if "experts" not in n]
    square = torch.stack([p.grad.norm() ** 2 for p in experts]).sum()
    dist.all_reduce(square)
    square = square + torch.stack([p.grad.norm() ** 2 for p in others]).sum()
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), MAX_NORM, square.sqrt())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(EXPERTS // world)
    torch.manual_seed(50 + rank)
    for expert in model.moe.experts.modules():
        if isinstance(expert, nn.Linear):
            expert.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        x = torch.randn(24, 8)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world)
        clip_gradients(model)
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
