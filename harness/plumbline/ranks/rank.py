"""One rank: a forked process that joins the group, calls the function, reports, and waits until it may exit.

It does not exit before all have reported: the end of one would break the connections in which others may still wait,
and hide why they wait. It exits without running destructors, which may hang: see
:mod:`plumbline.worker.recording.process_groups`.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO, cast

import torch

from plumbline.ranks.channel import Channel
from plumbline.ranks.rank_end import UnpicklableError
from plumbline.ranks.world import World, separate_rendezvous
from plumbline.worker.processes import die_with
from plumbline.worker.recording.process_groups import keep_process_groups

WITH_TERMINAL = 0
"""The rank that keeps the terminal: it stays in the session of the process that forked it, so that it can debug."""


@dataclass(frozen=True)
class RankReport:
    """What a rank sends when the function has ended: two pickles, which its supervisor passes on unopened."""

    raised: bool
    outcome: bytes
    description: bytes


@dataclass(frozen=True)
class Debugging:
    """What a rank sends when a debugger begins, or ends."""

    active: bool


@dataclass(frozen=True)
class Terminal:
    """What a rank is called with: who it is, and access to the terminal for a debugger."""

    rank: int
    _channel: Channel
    _saved: tuple[int, ...]

    @property
    def is_available(self) -> bool:
        """Whether this rank is the one that may debug."""
        return bool(self._saved)

    def take(self) -> None:
        """Read and write the terminal from now on; no time limit holds until :meth:`leave`."""
        self._channel.send(Debugging(True))
        sys.stdout.flush()
        for number, saved in enumerate(self._saved):
            os.dup2(saved, number)

    def leave(self) -> None:
        """Say that the debugger has ended."""
        self._channel.send(Debugging(False))


Function = Callable[[Terminal], Any]
Describe = Callable[[BaseException], Any]


@dataclass(frozen=True)
class Streams:
    """Where a rank writes: descriptors for stdout and stderr, None for those of the process above; for its stacks."""

    stdout: int | None
    stderr: int | None
    stack: int


def run(
    rank: int, world: World, function: Function, describe: Describe, channel: Channel, streams: Streams, parent: int
) -> NoReturn:
    """Be a rank. Does not return: the process ends here."""
    try:
        die_with(parent)
        terminal = Terminal(rank, channel, _redirect(rank, streams))
        _prepare_process(rank, world, streams)
        report = _call(rank, world, function, describe, terminal)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        channel.send(report)
        channel.receive()  # until the supervisor closes it
    except OSError:  # the supervisor is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _redirect(rank: int, streams: Streams) -> tuple[int, ...]:
    """Redirect the standard streams; return copies of those that lead to the terminal, none where it is not ours."""
    saved: tuple[int, ...] = ()
    if rank == WITH_TERMINAL:
        saved = tuple(os.dup(number) for number in (0, 1, 2))
    else:
        os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((0, null), (1, streams.stdout), (2, streams.stderr)):
        if target is not None:
            os.dup2(target, number)
    os.close(null)
    if streams.stdout is not None:
        # What they were may write elsewhere: to memory, or where it was redirected to.
        sys.stdin, sys.stdout, sys.stderr = (_text_stream(number) for number in (0, 1, 2))
    return saved


def _text_stream(number: int) -> TextIO:
    mode = "r" if number == 0 else "w"
    stream = open(number, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    return cast(TextIO, stream)


def _prepare_process(rank: int, world: World, streams: Streams) -> None:
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=streams.stack)
    faulthandler.register(signal.SIGUSR1, file=streams.stack, all_threads=True)
    os.environ.update(world.variables(rank))
    # The threads of the process above are not there after a fork, but OpenMP still counts on them: a second thread
    # would wait for ever.
    torch.set_num_threads(1)
    keep_process_groups(lambda: None)
    separate_rendezvous()


def _call(rank: int, world: World, function: Function, describe: Describe, terminal: Terminal) -> RankReport:
    try:
        world.join(rank)
        value = call(function, terminal)
        return RankReport(False, _pickled(value), pickle.dumps(None))
    except BaseException as error:
        return RankReport(True, _pickled_error(error), _pickled(_described(describe, error)))


def call(function: Function, terminal: Terminal) -> Any:
    """Call the function; the stacks of a rank are shown from here on."""
    return function(terminal)


def _described(describe: Describe, error: BaseException) -> Any:
    try:
        return describe(error)
    except Exception:
        return "".join(traceback.format_exception(error))


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        what = f"a {type(value).__name__}, which cannot be pickled ({error})"
        raise UnpicklableError(f"a rank returned {what}: return tensors, numbers or text") from None


def _pickled_error(error: BaseException) -> bytes:
    """Pickle an exception, or a stand-in where it does not survive that."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(UnpicklableError("".join(traceback.format_exception_only(error)).strip()))
    return data
