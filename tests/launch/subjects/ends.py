"""Trainers that end in all possible ways. They do not sleep: a hanging one waits for something that never happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from right_training import fit, for_ever

from plumbline import subject


def declare(name, in_the_middle, **settings):
    @subject(name=name, backends=["none", "ddp"])
    def train(job):
        fit(job, in_the_middle=in_the_middle, **settings)

    globals()[name] = train


def broken_batch():
    raise RuntimeError("the third batch is broken")


def leave_a_child():
    print("child", subprocess.Popen(["sleep", "1000"]).pid, flush=True)


def flood():
    for _ in range(20):
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)


declare("trains", lambda: None)
declare("raises", broken_batch)
declare("asks-to-exit", lambda: sys.exit(0))
declare("exits", lambda: os._exit(0))
declare("is-killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
declare("hangs", for_ever)
declare("leaves-a-child", leave_a_child)
declare("floods", flood)
declare("loads-with-workers", lambda: None, workers=1)


@subject(name="exits-before-the-group", backends=["ddp"])
def exits_before_the_group(job):
    if job.rank == 1:
        os._exit(0)
    fit(job)


@subject(name="hangs-on-its-way-out", backends=["none", "ddp"])
def hangs_on_its_way_out(job):
    class Stuck:
        def write(self, text):
            pass

        def flush(self):
            for_ever()

    fit(job)
    sys.stdout = Stuck()


@subject(name="says-who-it-is-and-hangs", backends=["ddp"])
def says_who_it_is_and_hangs(job):
    print("rank", os.getpid(), flush=True)
    for_ever()


@subject(name="prints-its-environment", backends=["ddp", "ddp2"])
def prints_its_environment(job):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    print(" ".join(os.environ[name] for name in names), flush=True)
    fit(job)
