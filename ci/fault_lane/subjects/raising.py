"""Trainers that raise: one rank, every rank something else, and errors that cannot be told easily."""

from __future__ import annotations

from right import declare


def one_rank(job):
    """Raise on one rank."""
    raise RuntimeError("the third batch is broken")


def every_rank(job):
    """Raise on every rank, each with words of its own."""
    raise ValueError(f"rank {job.rank} does not like it")


def leaves(job):
    """Ask politely for an end, as if all were well."""
    raise SystemExit(0)


def interrupts(job):
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def at_length(job):
    """Raise with a message of a megabyte."""
    raise RuntimeError("word " * 200_000 + "and the end of it")


class UnspeakableError(Exception):
    """An error that cannot be put into words."""

    def __str__(self):
        raise RuntimeError("words fail")


def unspeakable(job):
    """Raise what raises when it is asked what it is."""
    raise UnspeakableError


def rubbish(job):
    """Raise with signs that a terminal, a page and a table would obey."""
    raise RuntimeError("\x1b[31mred\x1b]0;title\x07 <script>alert(1)</script> | `x` \udcff \x00 \u202ebackwards")


trains = declare("trains", module=__name__)
one = declare("raises", one_rank)
every = declare("every-rank-raises", every_rank, everywhere=True)
asked = declare("asks-to-exit", leaves)
interrupted = declare("raises-interrupt", interrupts)
long = declare("raises-at-length", at_length)
wordless = declare("raises-the-unspeakable", unspeakable)
hostile = declare("raises-rubbish", rubbish)
