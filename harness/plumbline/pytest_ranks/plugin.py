"""The hooks and fixtures of the marker ``ranks``. Heavy modules are imported when a marked test runs."""

from __future__ import annotations

import bdb
import os
import unittest
from collections.abc import Callable, Generator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from plumbline.pytest_ranks.marker import DESCRIPTION, Marker, marker_of

if TYPE_CHECKING:
    from plumbline.check.function import CheckedFunction

MARKER: pytest.StashKey[Marker] = pytest.StashKey()
"""The marker of a test, once its set-up has begun."""

_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/dri/renderD128", "/dev/davinci_manager")
"""Device files of the drivers of NVIDIA (also in WSL), AMD, Intel and Ascend."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", DESCRIPTION)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move marked tests before all others if there may be devices.

    Ranks are forked from this process, and a device that another test has initialised does not survive a fork.
    """
    if any(map(os.path.exists, _DEVICES)):
        items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank of this process in a test marked ``ranks``. Fixtures that use it are set up on each rank."""
    from plumbline.pytest_ranks.rank_side import ON_RANK

    if ON_RANK in request.node.stash:
        return int(request.node.stash[ON_RANK].rank)
    if MARKER in request.node.stash:
        pytest.fail("a fixture requests `rank` by getfixturevalue(): make it an argument instead", pytrace=False)
    pytest.fail("the fixture `rank` works only in marked tests: add @pytest.mark.ranks(4)", pytrace=False)


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks of a test marked ``ranks``."""
    if MARKER not in request.node.stash:
        pytest.fail("the fixture `world_size` works only in marked tests: add @pytest.mark.ranks(4)", pytrace=False)
    return int(request.node.stash[MARKER].ranks)


class Plumbline:
    """The fixture ``plumbline``."""

    def check(self, train: Callable[[], Any], ranks: int = 2, **options: Any) -> CheckedFunction:
        """Call a training function on forked ranks, and judge its first optimizer steps: see ``check_function``."""
        from plumbline.check.function import check_function

        return check_function(train, ranks, **options)


@pytest.fixture(scope="session")
def plumbline() -> Plumbline:
    """Checks a training function: ``plumbline.check(train, ranks=4).assert_right()``."""
    return Plumbline()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = marker_of(item)
    if isinstance(marker, str):
        pytest.fail(marker, pytrace=False)
    if marker is None:
        return
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, unittest.TestCase)):
        pytest.fail("@pytest.mark.ranks is for functions and plain classes, not for unittest.TestCase", pytrace=False)
    from plumbline.pytest_ranks.rank_fixtures import leave_to_ranks

    item.stash[MARKER] = marker
    leave_to_ranks(item)


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Let the ranks of a marked test observe the limit of pytest-timeout, whose timer starts now."""
    if item.get_closest_marker("ranks"):
        with suppress(ImportError):  # import torch now: the seconds that it takes do not count
            import_module("plumbline.pytest_ranks.marked_test")
        from plumbline.pytest_ranks.marker import note_timer

        note_timer(item, settings)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if MARKER not in pyfuncitem.stash:
        return None
    from plumbline.pytest_ranks.marked_test import run_body
    from plumbline.pytest_ranks.rank_side import ON_RANK

    if ON_RANK in pyfuncitem.stash:
        return None
    run_body(pyfuncitem, pyfuncitem.stash[MARKER])
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and MARKER in item.stash and call.excinfo:
        from plumbline.pytest_ranks.marked_test import SHOWN
        from plumbline.pytest_ranks.rank_side import ON_RANK

        if SHOWN in item.stash and report.longrepr is not None:
            report.longrepr = item.stash[SHOWN]
        if item.config.getoption("usepdb", False) and ON_RANK not in item.stash:
            # The rank was debugged where it failed. pytest does not start a debugger for BdbQuit.
            call.excinfo = pytest.ExceptionInfo.from_exc_info((bdb.BdbQuit, bdb.BdbQuit(), call.excinfo.tb))
    return report
