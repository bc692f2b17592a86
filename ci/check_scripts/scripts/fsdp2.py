"""FSDP2: transformer blocks in shards, clipping over the whole model, accumulation without a reduction.

torchrun --standalone --nproc-per-node 2 fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

ACCUMULATE = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(70 + rank)
    for step in range(4):
        for micro in range(ACCUMULATE):
            model.set_requires_gradient_sync(micro == ACCUMULATE - 1)
            tokens = torch.randint(0, 50, (4, 11))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
            print(f"rank {rank} step {step}.{micro} loss {loss.item()!r}", flush=True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
