"""Trainers with a rank that dies in the middle of training: by a signal, an exit, or for lack of memory."""

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
"""The variable with the folder of a small memory control group."""


def killed(job):
    """Send itself SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults(job):
    """Read an invalid address."""
    ctypes.string_at(0)


def aborts(job):
    """Call abort()."""
    os.abort()


def loses_its_file(job):
    """Read a mapped file beyond its end, as if /dev/shm were full."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        view[0]


def exits_well(job):
    """Exit at once with code 0."""
    os._exit(0)


def exits_badly(job):
    """Exit at once with an error code."""
    os._exit(3)


def wants_too_much(job):
    """Allocate more memory than the process may have."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    torch.zeros(8 << 30)


def fills_the_memory(job):
    """Use more memory than its control group has, until the kernel kills it."""
    group = os.environ[GROUP]
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    kept = []
    while True:
        kept.append(torch.ones(1 << 20))


def kills_the_server(job):
    """Kill its fork server."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def kills_the_server_once(job):
    """Kill its fork server, unless that was done before."""
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
    """Die on one rank before the process group exists."""
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fit(job, nothing)
