"""torch 2.7.1, two ranks over gloo: reduce_scatter silently returns the sum when asked for the average.

Prints 3.0 as the average of 1 and 2, and gradients of fully_shard that are twice as long as DDP's. (torch 2.9: 1.5.)
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def run(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    average = torch.zeros(1)
    dist.reduce_scatter_tensor(average, torch.full((2,), rank + 1.0), op=dist.ReduceOp.AVG)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for wrap in (lambda model: fully_shard(model, mesh=mesh), DistributedDataParallel):
        model = wrap(torch.nn.Linear(1, 1, bias=False))
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        print(f"torch {torch.__version__}, rank {rank}: average {average.item()}, {next(model.parameters()).grad}")


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, nprocs=2)
