"""Trainers that leave processes behind: with signals ignored, grandchildren, daemons in sessions of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from right import declare

LIFE = 60.0
"""Seconds after which leftover processes end by themselves, in case nothing else ends them."""

WAITS = "import sys, threading; threading.Event().wait(float(sys.argv[1]))"
DEAF = f"import signal; [signal.signal(number, signal.SIG_IGN) for number in (1, 2, 15)]; {WAITS}"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}, sys.argv[1]]).wait()"
DAEMON = f"import os; os.fork() and os._exit(0); os.setsid(); os.closerange(0, 99); exec({DEAF!r})"
BREEDS = """
import os, signal, sys, time
end = time.monotonic() + float(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while time.monotonic() < end:  # each lives for a moment, and in that moment it has a successor
    if os.fork():
        time.sleep(0.01)
        os._exit(0)
    os.setsid()
"""


def ignores_term(job):
    """Ignore SIGTERM, SIGINT and SIGHUP, and hang."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Event().wait()


def _begin(program, **options):
    print("child", subprocess.Popen([sys.executable, "-c", program, str(LIFE)], **options).pid, flush=True)


def child(job):
    """Leave a child process behind."""
    _begin(WAITS)


def deaf_child(job):
    """Leave a child process behind that ignores these signals."""
    _begin(DEAF)


def grandchild(job):
    """Leave a child process's child behind."""
    _begin(PARENT)


def daemon(job):
    """Leave a daemon behind: in its own session, without parent, descriptors or environment."""
    _begin(DAEMON, env={})


def breeds(job):
    """Leave a process behind that keeps replacing itself by a fork."""
    _begin(BREEDS)


def dies_with_a_daemon(job):
    """Leave a daemon behind, and die."""
    daemon(job)
    os.kill(os.getpid(), signal.SIGKILL)


trains = declare("trains", module=__name__)
deaf = declare("ignores-sigterm", ignores_term)
one = declare("leaves-a-child", child)
stubborn = declare("leaves-a-deaf-child", deaf_child)
deep = declare("leaves-a-grandchild", grandchild)
far = declare("leaves-a-daemon", daemon)
many = declare("leaves-breeders", breeds)
dead = declare("dies-and-leaves-a-daemon", dies_with_a_daemon)
