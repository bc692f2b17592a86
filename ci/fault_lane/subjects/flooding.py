"""Trainers that print too much: text, binary data, endless lines."""

from __future__ import annotations

import os
import subprocess
import sys

from right import declare

MIB = 1 << 20


def _say(signs, descriptor=1):
    for _ in range(64):
        os.write(descriptor, signs * (MIB // len(signs)))


def out(job):
    """Print 64 MiB of lines, then raise."""
    for _ in range(64):
        sys.stdout.write(("x" * 1023 + "\n") * 1024)
    raise RuntimeError("after the flood")


def err(job):
    """Print 64 MiB of lines to standard error, then raise."""
    for _ in range(64):
        sys.stderr.write(("y" * 1023 + "\n") * 1024)
    raise RuntimeError("after the flood")


def binary(job):
    """Print 64 MiB of all byte values, then raise."""
    _say(bytes(range(256)))
    raise RuntimeError("after the flood")


def endless_line(job):
    """Print a line of 64 MiB, then raise."""
    _say(b"z")
    raise RuntimeError("after the flood")


def quietly(job):
    """Print 64 MiB, and continue to train."""
    _say(b"z")


def child(job):
    """Leave a child behind that prints for a minute."""
    subprocess.Popen(["timeout", "60", "yes", "and so on"])


trains = declare("trains", module=__name__)
lines = declare("floods-stdout", out)
errors = declare("floods-stderr", err)
rubbish = declare("floods-with-rubbish", binary)
line = declare("floods-one-line", endless_line)
goes_on = declare("floods-and-trains", quietly)
leaves = declare("leaves-a-flood", child)
