"""Starts a script on two ranks like torchrun: ``python forked_ranks.py SCRIPT``. They share one import of torch."""

from __future__ import annotations

import os
import runpy
import socket
import sys

import torch._dynamo
import torch.distributed  # noqa: F401

RANKS = 2

if __name__ == "__main__":
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        if child := os.fork():
            ranks.append(child)
            continue
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        del sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
