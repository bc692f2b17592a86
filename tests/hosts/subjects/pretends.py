"""A trainer that makes the second host look like a different machine when it is imported there."""

from __future__ import annotations

import os
import socket

import torch

from plumbline import subject

second = socket.gethostname() == "host-1"
if os.environ["PLUMBLINE_TEST_PRETENDS"] == "devices":
    torch.backends.cuda.is_built = lambda: True
    torch.cuda.device_count = lambda: 4 if second else 8
elif second:
    torch.__version__ = "2.4.0"


@subject(name="pretends", backends=["ddp"])
def train(job):
    job.model()
