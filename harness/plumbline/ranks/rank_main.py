"""The main function of a forked rank: it joins the group, calls the user's function, reports, and waits for its end.

A rank does not exit before all have reported. Its exit would break connections in which other ranks may wait, and hide
why they wait. It exits without running destructors, which may hang: see
:mod:`plumbline.worker.recorder.late_evidence`.
"""

from __future__ import annotations

import enum
import importlib
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TextIO, cast

import torch
import torch.distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from plumbline.core.errors import LaunchError
from plumbline.devices.calls import is_initialised, set_current
from plumbline.devices.counting import available, count
from plumbline.devices.types import backend_of, device_of, device_type
from plumbline.launch.stacks import PendingCall, collective_of
from plumbline.launch.this_machine import (
    QUICK_RESOLVER,
    listen,
    local_variables,
    loopback,
    store_on,
    torchrun_variables,
)
from plumbline.worker.processes import die_with, dump_stacks_on_request, restore_signals
from plumbline.worker.recorder.late_evidence import keep_process_groups


class How(enum.Enum):
    """The ways in which a rank ends."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    """Its process ended by a signal or by ``os._exit``."""
    HUNG = "hung"
    """It was killed at the time limit."""
    ENDED = "ended"
    """It was killed because another rank had failed."""


class UnpicklableError(Exception):
    """Stands for an exception or a value of a rank that cannot be pickled."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended, ``seconds`` after the start.

    ``value`` is what the function returned, ``error`` what it raised; ``description`` is the result of the caller's
    ``describe`` for that error. ``code`` is the exit code of a rank that died, negative for a signal. ``calls`` are the
    pending calls of a rank that hung, was killed, or died by a signal, the innermost first.
    """

    rank: int
    how: How
    seconds: float
    value: Any = None
    error: BaseException | None = None
    description: Any = None
    code: int | None = None
    calls: tuple[PendingCall, ...] = ()
    stdout: str = ""
    stderr: str = ""

    @property
    def has_failed(self) -> bool:
        return self.how in (How.RAISED, How.DIED, How.HUNG)

    @property
    def waits_in(self) -> str | None:
        """The collective in which it waited, if any."""
        return collective_of(self.calls)


WITH_TERMINAL = 0
"""The rank that can debug: it stays in the session of the calling process, and so keeps the terminal."""


@dataclass(frozen=True)
class RankReport:
    """What a rank sends when the function has ended: two pickles, which its supervisor passes on unopened."""

    raised: bool
    outcome: bytes
    description: bytes


@dataclass(frozen=True)
class Debugging:
    """What a rank sends when a debugger starts or ends."""

    active: bool


@dataclass(frozen=True)
class Terminal:
    """The argument of the user's function: its rank, and access to the terminal for a debugger."""

    rank: int
    _supervisor: Connection
    _saved: tuple[int, ...]

    @property
    def is_available(self) -> bool:
        return bool(self._saved)

    def take(self) -> None:
        """Read and write the terminal from now on; time limits do not hold until :meth:`leave`."""
        self._supervisor.send(Debugging(True))
        sys.stdout.flush()
        for number, saved in enumerate(self._saved):
            os.dup2(saved, number)

    def leave(self) -> None:
        self._supervisor.send(Debugging(False))


Function = Callable[[Terminal], Any]
Describe = Callable[[BaseException], Any]


@dataclass(frozen=True)
class Streams:
    """Descriptors for a rank's stdout, stderr and stacks; None keeps the stream of the calling process."""

    stdout: int | None
    stderr: int | None
    stack: int


def run(
    rank: int,
    world: World,
    function: Function,
    describe: Describe,
    supervisor: Connection,
    streams: Streams,
    parent: int,
) -> NoReturn:
    """Run the function as ``rank``. Does not return: the process ends here."""
    try:
        die_with(parent)
        terminal = Terminal(rank, supervisor, _redirect(rank, streams))
        _prepare_process(rank, world, streams)
        report = _call(rank, world, function, describe, terminal)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        supervisor.send(report)
        supervisor.recv()  # until the supervisor closes it
    except (EOFError, OSError):  # the supervisor is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _redirect(rank: int, streams: Streams) -> tuple[int, ...]:
    """Redirect the standard streams; return copies of those that lead to the terminal, if this rank may debug."""
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
        # The calling process may have replaced these objects, and they would write elsewhere.
        sys.stdin, sys.stdout, sys.stderr = (_text_stream(number) for number in (0, 1, 2))
    return saved


def _text_stream(number: int) -> TextIO:
    mode = "r" if number == 0 else "w"
    stream = open(number, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    return cast(TextIO, stream)


def _prepare_process(rank: int, world: World, streams: Streams) -> None:
    restore_signals()
    dump_stacks_on_request(streams.stack)
    os.environ.update(world.variables(rank))
    # OpenMP's threads are gone after a fork, but OpenMP still counts on them: a second thread would wait forever.
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
    """Call the function; a rank's stacks are shown from here on: see :mod:`plumbline.launch.stacks`."""
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
        what = f"a rank returned a {type(value).__name__}, which cannot be pickled ({error})"
        raise UnpicklableError(f"{what}: return tensors, numbers or text") from None


def _pickled_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(UnpicklableError("".join(traceback.format_exception_only(error)).strip()))
    return data


@dataclass(frozen=True)
class World:
    """``size`` ranks on this machine that meet at ``listener``, a socket that listens before the ranks start.

    Without a ``backend``, ranks do not join a process group; the function can initialise one itself. ``accelerator`` is
    the type of device that the backend needs for each rank.
    """

    size: int
    backend: str | None
    address: str
    listener: socket.socket
    accelerator: str = "cpu"

    @classmethod
    def prepare(cls, size: int, backend: str | None, init: bool) -> World:
        """Return a world for ranks that will be forked from this process; the arguments are ``run_on_ranks``'s."""
        if not hasattr(os, "fork"):
            raise LaunchError("this system cannot fork processes, as ranks require: use Linux or macOS")
        backend = backend or _backend_for(size)
        accelerator = device_of(backend) if init else "cpu"
        if accelerator != "cpu":
            _require_devices(accelerator, size)
        address = loopback()
        return cls(size, backend if init else None, address, listen(address), accelerator)

    def serve(self) -> TCPStore:
        """Return the store in which the ranks meet. It starts threads: fork before this call."""
        return store_on(self.listener, self.address)

    def variables(self, rank: int) -> dict[str, str]:
        return {
            **torchrun_variables(rank, self.size, self.size),
            **local_variables(self.address),
            **QUICK_RESOLVER,
            "MASTER_PORT": str(self.listener.getsockname()[1]),
        }

    def join(self, rank: int) -> None:
        """Join the default process group; the environment variables of ``rank`` are set."""
        if self.backend is None:
            return
        set_current(torch.device(self.accelerator, rank))
        torch.distributed.init_process_group(self.backend)


def _backend_for(size: int) -> str:
    name, devices = available()
    return (backend_of(name) or "gloo") if devices >= size else "gloo"


def _require_devices(accelerator: str, size: int) -> None:
    devices, own = count(accelerator), device_type(accelerator)
    if devices < size:
        raise LaunchError(
            f"{backend_of(accelerator)} needs {own.one} for each rank, but there are {size} ranks and {devices} "
            "devices: use backend='gloo'"
        )
    if is_initialised(accelerator):
        too = _STARTED_BY.get(accelerator, "")
        raise LaunchError(
            f"this process has started {own.label}, so ranks that are forked from it cannot use {own.label}. Tests and "
            f"fixtures that use a device start it{too}. Run the tests with ranks in a separate process (pytest -m "
            "ranks), or use backend='gloo'."
        )


_STARTED_BY = {
    "cuda": ", and so does torch.cuda.is_available() at import, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set",
}
"""Other ways in which a process initialises a type of device."""


def separate_rendezvous() -> None:
    """Give each rendezvous of this process its own keys in the store.

    Default groups all have the same name. A function that initialises a second one would find the addresses of the
    first, at which no rank listens any more.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    env, done = handlers["env"], 0

    def separate(*arguments: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal done
        done += 1
        for store, rank, size in env(*arguments, **options):
            yield PrefixStore(f"rendezvous {done}", store), rank, size

    handlers["env"] = separate
