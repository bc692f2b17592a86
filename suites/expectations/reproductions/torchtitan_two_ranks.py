"""torchtitan 0.3.0: data-parallel ranks draw the same random numbers, including dropout masks.

Run with `torchrun --nproc-per-node 2`. Seeds the ranks as torchtitan's Trainer does, and prints each rank's samples
after dropout: the masks are equal.
"""

from unittest.mock import patch

import torch
import torch.testing._internal.distributed.fake_pg  # the backend for torchtitan's mesh dimensions of size 1

with patch("torch._utils._get_available_device_type", lambda: "cpu"):
    from torchtitan.config.configs import DebugConfig, ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_determinism

torch.distributed.init_process_group("gloo")
dims = ParallelDims.from_config(ParallelismConfig(data_parallel_shard_degree=2, spmd_backend="partial_dtensor"), 2)
set_determinism(dims, torch.device("cpu"), DebugConfig(seed=1), distinct_seed_mesh_dims=["pp"])
left = torch.nn.functional.dropout(torch.ones(12), 0.5)
print(torch.distributed.get_rank(), left.bool().int().tolist(), flush=True)
torch.distributed.destroy_process_group()
