"""Sequence parallelism in the manner of Ulysses: each rank has half of every sequence, and half of the heads.

torchrun --standalone --nproc-per-node 2 ulysses.py
"""

import torch
import torch.distributed as dist
from torch import nn

TOKENS, WIDTH, HEADS = 16, 32, 4
MAX_NORM = 0.5


def exchange(x, scatter, gather):
    """Scatter one dimension over the ranks, and gather another."""
    world = dist.get_world_size()
    parts = [one.contiguous() for one in x.chunk(world, scatter)]
    sent, got = torch.stack(parts), torch.empty(world, *parts[0].shape, dtype=x.dtype)
    dist.all_to_all_single(got, sent)
    return torch.cat(list(got), gather)


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.scatter, ctx.gather = scatter, gather
        return exchange(x, scatter, gather)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.gather, ctx.scatter), None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        y = self.norm1(x)
        heads = [one(y).unflatten(-1, (HEADS, -1)) for one in (self.q, self.k, self.v)]
        q, k, v = (SeqAllToAll.apply(one, 2, 1).transpose(1, 2) for one in heads)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(SeqAllToAll.apply(attended, 1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 50)

    def forward(self, tokens, positions):
        return self.out(self.norm(self.blocks(self.embed(tokens) + self.position(positions))))


def reduce_gradients(model, world):
    """Average gradients, because each rank's loss is the mean over its own part."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    for step in range(5):
        tokens = torch.randint(0, 50, (4, TOKENS + 1))  # the same on all ranks
        logits = model(tokens[:, :-1][:, own], torch.arange(TOKENS)[own])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, own].flatten())
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(model, world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
