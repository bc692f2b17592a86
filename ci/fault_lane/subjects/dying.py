"""Trainers one of whose ranks dies in the middle: signals, exits, memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import tempfile

import torch
from right import declare, fit, nothing

from plumbline import subject

GROUP = "PLUMBLINE_FAULTS_MEMORY_GROUP"
"""The variable with the folder of a memory control group, which has little to give."""


def killed(job):
    """Be killed, as by somebody else."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults(job):
    """Read what is not there."""
    ctypes.string_at(0)


def aborts(job):
    """Give up, as C++ does."""
    os.abort()


def loses_its_file(job):
    """Read a mapped file beyond its end, as when /dev/shm is full."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        view[0]


def exits_well(job):
    """End at once, as if all were well."""
    os._exit(0)


def exits_badly(job):
    """End at once with a code."""
    os._exit(3)


def wants_too_much(job):
    """Ask for more memory than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    torch.zeros(8 << 30)


def fills_the_memory(job):
    """Use more memory than its control group has, until the kernel ends it."""
    group = os.environ[GROUP]
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    kept = []
    while True:
        kept.append(torch.ones(1 << 20))


def kills_the_server(job):
    """Kill what started it."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def kills_the_server_once(job):
    """Kill what started it, if nobody has done it before."""
    try:
        os.close(os.open(os.environ["PLUMBLINE_FAULTS_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    kills_the_server(job)


trains = declare("trains", module=__name__)
killed_ = declare("is-killed", killed)
segv = declare("segfaults", segfaults)
abrt = declare("aborts", aborts)
bus = declare("loses-its-file", loses_its_file)
zero = declare("exits-with-0", exits_well)
three = declare("exits-with-3", exits_badly)
limited = declare("wants-too-much-memory", wants_too_much)
oom = declare("fills-the-memory", fills_the_memory)
server = declare("kills-the-server", kills_the_server)
once = declare("kills-the-server-once", kills_the_server_once)


@subject(name="dies-before-the-group", backends=["ddp"])
def dies_before_the_group(job):
    """One rank dies before the others have met it."""
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fit(job, nothing)
