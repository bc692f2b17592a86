"""A trainer that uses a fixed port."""

from __future__ import annotations

import os

import torch.distributed
from right import fit, nothing

from plumbline import subject


@subject(name="insists-on-a-port", backends=["ddp"])
def train(job):
    """Create the process group on a fixed port, then train."""
    place = f"tcp://127.0.0.1:{os.environ['PLUMBLINE_FAULTS_PORT']}"
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    torch.distributed.init_process_group(job.comm, init_method=place, rank=job.rank, world_size=job.world_size)
    torch.distributed.destroy_process_group()
    fit(job, nothing)
