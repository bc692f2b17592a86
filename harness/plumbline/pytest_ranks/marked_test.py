"""Runs a marked test on its ranks from pytest's process, and derives the test's outcome from how they ended.

A failure shows the failed ranks in groups, in the order of their failures.
"""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from plumbline.core.errors import LaunchError
from plumbline.launch.stacks import PendingCall
from plumbline.pytest_ranks.marker import Marker, TimeLimit
from plumbline.pytest_ranks.rank_side import BodyOnRank, ChainLink, Failure, Kind, Observed
from plumbline.ranks import How, RankEnd, run_on_ranks

_LONGEST_STACK = 12
_LOST = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""The messages of gloo and nccl about a lost rank."""


@dataclass(frozen=True)
class Group:
    """Ranks that ended in the same way."""

    ends: tuple[RankEnd, ...]

    @property
    def first(self) -> RankEnd:
        return self.ends[0]

    @property
    def names(self) -> str:
        """The ranks in words: ``ranks 0–2, 5``."""
        ranks = [end.rank for end in self.ends]
        return f"rank{'s' if len(ranks) > 1 else ''} {_numbers(ranks)}"


def groups_of(ends: Iterable[RankEnd], file: str) -> list[Group]:
    """Group the ends by kind and place, in the order of the first end of each group."""
    found: dict[object, list[RankEnd]] = {}
    for end in sorted(ends, key=order):
        trail = end.description.trail if isinstance(end.description, Failure) else end.description
        found.setdefault((end.how, end.code, trail, calls_of_test(end, file)), []).append(end)
    return [Group(tuple(sorted(group, key=lambda end: end.rank))) for group in found.values()]


def order(end: RankEnd) -> tuple[float, bool, int]:
    return math.inf if end.how is How.HUNG else end.seconds, end.waits_in is not None, end.rank


def calls_of_test(end: RankEnd, file: str) -> tuple[PendingCall, ...]:
    outermost = max((index for index, call in enumerate(end.calls) if call.file == file), default=-1)
    return end.calls[: outermost + 1] or end.calls


def representation(ends: Sequence[RankEnd], limit: str, file: str, line: int) -> ExceptionChainRepr:
    """Return pytest's representation of a failed test: groups of failed ranks, then of ranks that were killed.

    It consists of pytest's own classes, so that it looks like any failure and passes through xdist. The summary line is
    that of the group that failed first. ``limit`` is the time limit in words.
    """
    links: list[ChainLink] = []
    crash = None
    lost = [end for end in ends if _lost_a_peer(end, ends)]
    for group in groups_of((end for end in ends if end.has_failed and end not in lost), file):
        links += [_heading(f"―― {group.names} of {len(ends)} {_failed(group.first, limit)} ――"), *_shown(group, file)]
        crash = crash or _crash(group, len(ends), limit, file, line)
    for group in groups_of((end for end in ends if end.how is How.ENDED), file):
        links += [
            _heading(f"―― {group.names} stopped after that failure{_waiting(group.first)} ――"),
            *_stack(group.first, file),
        ]
    for group in groups_of(lost, file):
        links.append(_heading(f"―― {group.names} lost the connection to the rank that died ――"))
    passed = [end.rank for end in ends if end.how is How.RETURNED]
    if passed:
        links.append(_heading(f"―― rank{'s' if len(passed) > 1 else ''} {_numbers(passed)} passed ――"))
    links.append((ReprTraceback([], None, "long"), crash, None))
    return ExceptionChainRepr(links)


def _lost_a_peer(end: RankEnd, ends: Sequence[RankEnd]) -> bool:
    """Return whether a rank raised only because it lost the connection to a rank that died."""
    return (
        end.how is How.RAISED
        and any(other.how is How.DIED for other in ends)
        and isinstance(end.description, Failure)
        and any(words in end.description.message for words in _LOST)
    )


def _failed(end: RankEnd, limit: str) -> str:
    if end.how is How.RAISED:
        return "failed"
    if end.how is How.HUNG:
        return f"had not ended after {limit}{_waiting(end)}"
    assert end.code is not None
    if end.code >= 0:
        return f"exited with code {end.code} before the test had ended"
    return f"died by signal {-end.code} ({_signal(-end.code)})"


def _waiting(end: RankEnd) -> str:
    return f", waiting in {end.waits_in}" if end.waits_in else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def _shown(group: Group, file: str) -> list[ChainLink]:
    description = group.first.description
    if not isinstance(description, Failure):
        return [_text(description)] if description else _stack(group.first, file)
    others = [
        f"rank {end.rank}: {end.description.message}"
        for end in group.ends[1:]
        if isinstance(end.description, Failure) and end.description.message != description.message
    ]
    return [*description.chain, *([_text("\n".join(others))] if others else [])]


def _stack(end: RankEnd, file: str) -> list[ChainLink]:
    calls = calls_of_test(end, file)
    shown = [f"  {call.file}:{call.line} in {call.name}" for call in calls[:_LONGEST_STACK]]
    if len(calls) > len(shown):
        shown.append(f"  … {len(calls) - len(shown)} more")
    return [_text("\n".join(["  (the innermost call first)", *shown]))] if shown else []


def _crash(group: Group, ranks: int, limit: str, file: str, line: int) -> ReprFileLocation:
    description = group.first.description
    if isinstance(description, Failure):
        crash = description.chain[-1][1]
        place = (crash.path, crash.lineno) if crash else (file, line)
        return ReprFileLocation(*place, f"{group.names} of {ranks}: {description.message}")
    calls = calls_of_test(group.first, file)
    place = (file, next((call.line for call in calls if call.file == file), line))
    return ReprFileLocation(*place, f"{group.names} of {ranks} {_failed(group.first, limit)}")


def _heading(text: str) -> ChainLink:
    return ReprTraceback([], None, "long"), None, text


def _text(text: str) -> ChainLink:
    return ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native"), None, None


def _numbers(ranks: Sequence[int]) -> str:
    """Format sorted numbers, with three or more consecutive ones as ``0–2``."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts = [f"{row[0]}–{row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows]
    return ", ".join(parts)


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
