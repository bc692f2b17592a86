"""FSDP2 in bfloat16, gradients reduced in bfloat16 too: what MixedPrecisionPolicy does where reduce_dtype is left out.

torchrun --standalone --nproc-per-node 2 fsdp2_bf16.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(80 + rank)
    for step in range(4):
        x = torch.randn(16, 16)
        loss = nn.functional.cross_entropy(model(x).float(), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
