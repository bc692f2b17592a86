"""The part of a marked test on a rank: the body with its fixtures, the debugger, and the report of a failure."""

from __future__ import annotations

import enum
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from _pytest._code.code import ExceptionRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from plumbline.pytest_ranks.rank_fixtures import set_up_here
from plumbline.ranks.rank_main import Terminal

ON_RANK: pytest.StashKey[Terminal] = pytest.StashKey()
"""The rank's terminal, in the stash of a test that runs on a rank."""


class Kind(enum.Enum):
    """The meaning of an exception for the test."""

    FAILED = "failed"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    EXIT = "exit"


_KINDS = {pytest.skip.Exception: Kind.SKIPPED, pytest.xfail.Exception: Kind.XFAILED, pytest.exit.Exception: Kind.EXIT}

ChainLink = tuple[ReprTraceback, ReprFileLocation | None, str | None]


Warned = tuple[str, type[Warning], str, int]
"""A warning of a rank: the arguments of ``warnings.warn_explicit``."""


@dataclass(frozen=True)
class Observed:
    """The log and the warnings of a body on a rank."""

    log: str
    warned: tuple[Warned, ...]


@dataclass(frozen=True)
class Failure:
    """A rank's report of an exception, with pytest's representation of it.

    ``reason`` is the message of ``pytest.skip`` and the like; ``place`` is where the exception was raised. Exceptions
    with the same ``trail`` (type and lines) have the same cause. ``quit``: the user has left the debugger with ``q``.
    """

    kind: Kind
    reason: str
    chain: tuple[ChainLink, ...]
    message: str
    place: tuple[str, int]
    trail: tuple[object, ...]
    observed: Observed
    quit: bool = False


@dataclass
class BodyOnRank:
    """The body of a test, which is called on each rank."""

    item: pytest.Function
    _observed: Observed = field(default=Observed("", ()), init=False)
    _has_quit: bool = field(default=False, init=False)

    def __call__(self, terminal: Terminal) -> Observed:
        self.item.stash[ON_RANK] = terminal
        self.item.config.pluginmanager.register(_DebuggerAtTerminal(terminal))
        with self._observing():
            try:
                with set_up_here(self.item):
                    self.item.ihook.pytest_pyfunc_call(pyfuncitem=self.item)
            except BaseException as error:
                self._debug(error, terminal)
                raise
        return self._observed

    def describe(self, error: BaseException) -> Failure:
        shown = self.item.repr_failure(pytest.ExceptionInfo.from_exception(error))
        links: tuple[ChainLink, ...]
        if chain := getattr(shown, "chain", None):
            links = tuple(chain)
        elif isinstance(shown, ExceptionRepr):
            links = ((shown.reprtraceback, shown.reprcrash, None),)
        else:
            links = ((ReprTraceback([ReprEntryNative([f"{shown}\n"])], None, "native"), None, None),)
        calls = traceback.extract_tb(error.__traceback__)
        crash = links[-1][1]
        return Failure(
            kind=next((kind for raised, kind in _KINDS.items() if isinstance(error, raised)), Kind.FAILED),
            reason=str(getattr(error, "msg", "")),
            chain=links,
            message=crash.message if crash else str(shown),
            place=(crash.path, crash.lineno) if crash else (str(self.item.path), 0),
            trail=(type(error).__qualname__, *_from_test_on(calls, str(self.item.path))),
            observed=self._observed,
            quit=self._has_quit,
        )

    @contextmanager
    def _observing(self) -> Iterator[None]:
        text = io.StringIO()
        handler = logging.StreamHandler(text)
        handler.setFormatter(logging.Formatter("%(levelname)-8s %(name)s:%(filename)s:%(lineno)d %(message)s"))
        logging.getLogger().addHandler(handler)
        with warnings.catch_warnings(record=True) as caught:
            try:
                yield
            finally:
                warned = ((str(one.message), one.category, one.filename, one.lineno) for one in caught)
                self._observed = Observed(text.getvalue(), tuple(dict.fromkeys(warned)))

    def _debug(self, error: BaseException, terminal: Terminal) -> None:
        """With ``--pdb``, let pytest start its debugger where the exception was raised."""
        item = self.item
        if not (item.config.getoption("usepdb", False) and terminal.is_available):
            return

        def raise_again() -> None:
            raise error

        call = pytest.CallInfo.from_call(raise_again, when="call")
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        if not report.failed or isinstance(error, pytest.exit.Exception):
            return
        terminal.take()
        try:
            item.ihook.pytest_exception_interact(node=item, call=call, report=report)
        except pytest.exit.Exception:
            self._has_quit = True
        finally:
            terminal.leave()


def _from_test_on(calls: list[traceback.FrameSummary], file: str) -> list[tuple[str, int | None]]:
    """Return the places of the calls from the first one in the test's file on; earlier ones depend on the rank."""
    places = [(call.filename, call.lineno) for call in calls]
    first = next((number for number, (name, _) in enumerate(places) if name == file), 0)
    return places[first:]


class _DebuggerAtTerminal:
    """Gives the terminal to a debugger that the body starts with ``breakpoint()``."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    @pytest.hookimpl(tryfirst=True)
    def pytest_enter_pdb(self) -> None:
        if not self._terminal.is_available:
            raise RuntimeError(f"rank {self._terminal.rank} has no terminal: use `if rank == 0: breakpoint()`")
        self._terminal.take()

    def pytest_leave_pdb(self) -> None:
        self._terminal.leave()
