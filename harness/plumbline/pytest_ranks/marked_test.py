"""Runs a marked test on its ranks from pytest's process, and derives the test's outcome from how they ended."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import pytest
from _pytest._code.code import ExceptionChainRepr

from plumbline.core.errors import LaunchError
from plumbline.pytest_ranks.failures import order, representation
from plumbline.pytest_ranks.marker import Marker, TimeLimit
from plumbline.pytest_ranks.rank_side import BodyOnRank, Failure, Kind, Observed
from plumbline.ranks import RankEnd, run_on_ranks

SHOWN: pytest.StashKey[ExceptionChainRepr | tuple[str, int, str]] = pytest.StashKey()
"""The representation of a marked test that did not pass."""

_WITHOUT_FAILURE = {
    Kind.EXIT: pytest.exit.Exception,
    Kind.XFAILED: pytest.xfail.Exception,
    Kind.SKIPPED: pytest.skip.Exception,
}
"""The outcomes of a test without failed ranks, the strongest first. One rank is enough for each."""


class RanksFailed(Exception):  # noqa: N818
    """Ranks died or hung, and none raised."""


def run_body(item: pytest.Function, marker: Marker) -> None:
    """Run the body of a test on its ranks."""
    body = BodyOnRank(item)
    with _not_captured(item.config), TimeLimit.of_ranks(item, marker) as limit:
        try:
            ends = run_on_ranks(
                body,
                marker.ranks,
                timeout=limit.seconds,
                backend=marker.backend,
                init=marker.init,
                capture=item.config.getoption("capture", "no") != "no",
                describe=body.describe,
            )
        except LaunchError as error:
            pytest.fail(str(error), pytrace=False)
    _hand_on(item, ends)
    failed = [end for end in ends if _kind(end) is Kind.FAILED]
    if failed:
        _fail(item, [end for end in ends if _kind(end) in (None, Kind.FAILED)], limit)
    for kind, raised in _WITHOUT_FAILURE.items():
        for end in ends:
            if _kind(end) is kind:
                if kind is Kind.SKIPPED:
                    item.stash[SHOWN] = (*end.description.place, f"Skipped: rank {end.rank}: {end.description.reason}")
                raise raised(end.description.reason)


@contextmanager
def _not_captured(config: pytest.Config) -> Iterator[None]:
    """Suspend pytest's capturing, so that ranks inherit its real streams, for their own capturing or a debugger."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend(in_=True)
    try:
        yield
    finally:
        capture.resume()


def _kind(end: RankEnd) -> Kind | None:
    if isinstance(end.description, Failure):
        return end.description.kind
    return Kind.FAILED if end.has_failed else None


def _fail(item: pytest.Function, ends: Sequence[RankEnd], limit: TimeLimit) -> NoReturn:
    path, line, _ = item.reportinfo()
    item.stash[SHOWN] = representation(ends, limit.words, str(path), (line or 0) + 1)
    if any(isinstance(end.description, Failure) and end.description.quit for end in ends):
        item.session.shouldstop = "Quitting debugger"
    first = min((end for end in ends if end.has_failed), key=order)
    raise first.error or RanksFailed(f"rank {first.rank} {first.how.value}")


def _hand_on(item: pytest.Function, ends: Sequence[RankEnd]) -> None:
    warned = {}
    for end in ends:
        left = end.description.observed if isinstance(end.description, Failure) else end.value
        log = left.log if isinstance(left, Observed) else ""
        for stream, text in (("stdout", end.stdout), ("stderr", end.stderr), ("log", log)):
            if text:
                item.add_report_section("call", f"{stream} of rank {end.rank}", text)
        warned.update(dict.fromkeys(left.warned if isinstance(left, Observed) else ()))
    for one in warned:
        warnings.warn_explicit(*one)
