"""Sets up, on each rank, the fixtures of a marked test that depend on the rank.

All others are set up once, before the fork; ranks inherit their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

OWN_OF_A_RANK = frozenset({"rank", "capsys", "capsysbinary", "capfd", "capfdbinary", "recwarn"})
"""Fixtures that differ between ranks, as do fixtures that use them."""


def on_rank(item: pytest.Function) -> tuple[str, ...]:
    """Return the names of the fixtures that are set up on each rank, in the order of their set-up."""
    known = item._fixtureinfo.name2fixturedefs
    uses = {name: {used for one in definitions for used in one.argnames} for name, definitions in known.items()}
    found = set(OWN_OF_A_RANK)
    while more := {name for name, used in uses.items() if name not in found and used & found}:
        found |= more
    return tuple(name for name in item._fixtureinfo.names_closure if name in found)


def leave_to_ranks(item: pytest.Function) -> None:
    """Exclude the fixtures that are set up on each rank from the set-up of a test."""
    left = on_rank(item)
    item.fixturenames = [name for name in item._fixtureinfo.names_closure if name not in left]


class SubtestsOnRank:
    """Replaces pytest's fixture ``subtests``, whose reports would stay on the rank. The first failure ends the test."""

    @contextmanager
    def test(self, msg: str | None = None, **values: object) -> Iterator[None]:
        """Run a subtest; its exception names it. A skipped subtest does not skip the others."""
        try:
            yield
        except pytest.skip.Exception:
            return
        except Exception as error:
            named = [f"{name}={value!r}" for name, value in values.items()]
            add_note = getattr(error, "add_note", lambda note: None)  # since Python 3.11
            add_note(" ".join(["in the subtest", *([msg] if msg else []), *named]))
            raise


@contextmanager
def set_up_here(item: pytest.Function) -> Iterator[None]:
    """On a rank, set up the fixtures that depend on it, and tear them down; pytest's process tears down the others."""
    with ExitStack() as teardown:
        if "subtests" in item.funcargs:
            item.funcargs["subtests"] = SubtestsOnRank()
        for name in on_rank(item):
            # It may be set up already, because another fixture uses it.
            teardown.callback(item._fixtureinfo.name2fixturedefs[name][-1].finish, item._request)  # type: ignore[arg-type]
            item.funcargs[name] = item._request.getfixturevalue(name)
        yield
