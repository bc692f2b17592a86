"""Trainers that never end. They do not sleep: each waits for something that never happens."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import torch.distributed
from right import declare, fit, nothing

from plumbline import subject


def for_ever(job):
    """Wait for an event that is never set."""
    threading.Event().wait()


def barrier(job):
    """Wait in a barrier while the other ranks wait in their backward."""
    torch.distributed.barrier()


def gathers(job):
    """Wait in an all-gather of objects while the other ranks wait in their backward."""
    torch.distributed.all_gather_object([None] * job.world_size, "here")


def stops(job):
    """Stop itself, as Ctrl-Z or a debugger would."""
    os.kill(os.getpid(), signal.SIGSTOP)
    for_ever(job)  # threads on other cores run on for a moment


def holds_the_lock(job):
    """Wait in C with the GIL held, like a destructor that joins a thread."""
    _deadlock(ctypes.PyDLL(None))


def _deadlock(library):
    """Lock a mutex twice; no signal ends this wait."""
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def deaf(job):
    """Wait with all signals blocked that can be blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _deadlock(ctypes.CDLL(None))


def waits_for_work(job):
    """Wait for a collective that no other rank joins."""
    torch.distributed.barrier(async_op=True).wait()


trains = declare("trains", module=__name__)
sleeping = declare("hangs", for_ever)
everyone = declare("every-rank-hangs", for_ever, everywhere=True)
mismatched = declare("calls-another-collective", barrier)
objects = declare("gathers-alone", gathers)
stopped = declare("is-stopped", stops)
locked = declare("hangs-in-c", holds_the_lock)
silent = declare("hears-nothing", deaf)
work = declare("waits-for-work", waits_for_work)


@subject(name="joins-nobody", backends=["ddp"])
def joins_nobody(job):
    """Never reach the rendezvous, on one rank."""
    if job.rank == 1:
        for_ever(job)
    fit(job, nothing)


class Stuck:
    """An object whose destructor hangs."""

    def __del__(self):
        _deadlock(ctypes.PyDLL(None))


@subject(name="hangs-in-a-destructor", backends=["none", "ddp"])
def hangs_in_a_destructor(job):
    """Train to the end, and hang in a destructor."""
    fit(job, nothing)
    stuck = Stuck()
    del stuck


@subject(name="hangs-on-its-way-out", backends=["none", "ddp"])
def hangs_on_its_way_out(job):
    """Train to the end, and hang at exit, after evidence is written."""
    import sys

    class Blocked:
        def write(self, text):
            pass

        def flush(self):
            threading.Event().wait()

    fit(job, nothing)
    sys.stdout = Blocked()
