"""Trainers for several nodes: they report their environment, die on a node or with it, or wait in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

from right_training import fit

from plumbline import subject

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NODELIST"),
    *("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "PLUMBLINE_TOKEN", "FROM_THE_USER"),
)


@subject(name="says-what-it-was-told", backends=["ddp"])
def says_what_it_was_told(job):
    told = {name: os.environ.get(name) for name in NAMES}
    print(json.dumps({**told, "host": socket.gethostname()}), flush=True)
    fit(job)


@subject(name="dies-on-the-second-node", backends=["ddp"])
def dies_on_the_second_node(job):
    fit(job, after_a_step=lambda: os.kill(os.getpid(), signal.SIGKILL) if job.rank == 2 else None)


@subject(name="takes-its-node-along", backends=["ddp"])
def takes_its_node_along(job):
    fit(job, after_a_step=lambda: os.kill(os.getppid(), signal.SIGKILL) if job.rank == 2 else None)


@subject(name="takes-its-node-along-once", backends=["ddp"])
def takes_its_node_along_once(job):
    once = Path(os.environ["PLUMBLINE_TEST_FOLDER"]) / "once"

    def take_along():
        if job.rank == 2 and not once.exists():
            once.touch()
            os.kill(os.getppid(), signal.SIGKILL)

    fit(job, after_a_step=take_along)


@subject(name="waits-in-the-middle", backends=["ddp"])
def waits_in_the_middle(job):
    """Touch a file after the first step, and continue when another one exists."""
    folder = Path(os.environ["PLUMBLINE_TEST_FOLDER"])

    def wait():
        (folder / f"reached-{job.rank}").touch()
        while not (folder / "go-on").exists():
            time.sleep(0.01)

    fit(job, after_a_step=wait)
