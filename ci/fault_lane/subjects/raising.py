"""Trainers that raise: on one rank, on every rank differently, and errors that are hard to report."""

from __future__ import annotations

from right import declare


def one_rank(job):
    """Raise on one rank."""
    raise RuntimeError("the third batch is broken")


def every_rank(job):
    """Raise a different message on every rank."""
    raise ValueError(f"rank {job.rank} does not like it")


def leaves(job):
    """Raise SystemExit with code 0."""
    raise SystemExit(0)


def interrupts(job):
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def at_length(job):
    """Raise with a message of a megabyte."""
    raise RuntimeError("word " * 200_000 + "and the end of it")


class UnspeakableError(Exception):
    """An error that raises when it is converted to a string."""

    def __str__(self):
        raise RuntimeError("words fail")


def unspeakable(job):
    """Raise an error that cannot be converted to a string."""
    raise UnspeakableError


def rubbish(job):
    """Raise with characters that a terminal, a page or a table would interpret."""
    raise RuntimeError("\x1b[31mred\x1b]0;title\x07 <script>alert(1)</script> | `x` \udcff \x00 \u202ebackwards")


trains = declare("trains", module=__name__)
one = declare("raises", one_rank)
every = declare("every-rank-raises", every_rank, everywhere=True)
asked = declare("asks-to-exit", leaves)
interrupted = declare("raises-interrupt", interrupts)
long = declare("raises-at-length", at_length)
wordless = declare("raises-the-unspeakable", unspeakable)
hostile = declare("raises-rubbish", rubbish)
