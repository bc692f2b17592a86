"""torch 2.14.1: on gloo, the backward of all_gather mixes up gradients that are transposed views.

Run with ``torchrun --standalone --nproc-per-node 2``. Prints an error of 0 for each rank if all is right.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for name, permuted in (("in order", lambda one: one), ("transposed", lambda one: one.transpose(0, 1).contiguous())):
    own = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    factors = torch.randn(2, 3 * world, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + rank))
    (permuted(torch.cat(with_gradients.all_gather(own), 1)) * permuted(factors)).sum().backward()
    dist.all_reduce(factors)
    right = factors.chunk(world, 1)[rank]
    error = float((own.grad - right).norm() / right.norm())
    print(f"torch {torch.__version__}, rank {rank}, {name}: relative error {error:.2g}", flush=True)
dist.destroy_process_group()
