"""torchtitan 0.3.0: a checkpoint mixes the BatchNorm statistics of data-parallel ranks.

Each rank has its own statistics. torchtitan gives them to torch.distributed.checkpoint as if they were replicated, and
that writes each buffer on the rank that has the fewest bytes to write. Run with `torchrun --nproc-per-node 2`. Prints
what each rank had before saving, and what both have after loading.
"""

import contextlib
import os
import tempfile
from unittest.mock import patch

import torch
import torch.testing._internal.distributed.fake_pg  # the backend for torchtitan's mesh dimensions of size 1

with patch("torch._utils._get_available_device_type", lambda: "cpu"):
    from torchtitan.components.checkpointer import CheckpointManager

torch.distributed.init_process_group("gloo")
rank, shared = torch.distributed.get_rank(), [tempfile.mkdtemp()]
torch.distributed.broadcast_object_list(shared)
model = torch.nn.BatchNorm1d(1, affine=False)
model.running_mean.fill_(rank)
model.running_var.fill_(rank)
print("rank", rank, "had", model.running_mean.item(), model.running_var.item(), flush=True)
config = CheckpointManager.Config(enable=True, folder=shared[0], last_save_model_only=False)
with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
    manager = config.build(
        dataloader=None, model_parts=[model], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    manager.save(1, last_step=True)
    manager.load(1)
print("rank", rank, "has", model.running_mean.item(), model.running_var.item(), flush=True)
torch.distributed.destroy_process_group()
