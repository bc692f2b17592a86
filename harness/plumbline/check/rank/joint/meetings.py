"""Lets ranks meet before each collective of a forward that runs again, so that none waits for a failed rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plumbline.check.rank.joint.operator_watch import OperatorWatch
from plumbline.check.rank.store_exchange import AbsentRankError, Exchange, NoAgreementError
from plumbline.devices.calls import OutOfMemoryError
from plumbline.replay.collectives import groups_in, is_collective, members_of_groups

MESSAGES = frozenset({"send", "recv_", "recv_any_source_"})
"""Point-to-point operators. Both ranks may send first, so neither can wait for the other before."""


PATIENCE_S = 1800.0
"""Seconds that a rank waits for others that have not failed: as long as torch's collectives wait by default. A rank
that gave up earlier would leave later ones waiting in the collective."""


class Meetings:
    """Lets the members of a process group meet in the store before each of their collectives.

    A collective waits for all ranks of its group. Without a meeting, it would wait for a failed rank until the group's
    timeout, which would end the training.
    """

    def __init__(self) -> None:
        self._number = 0
        self._groups: dict[str, Exchange] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold meetings inside the block, which all ranks enter together; tell the others of an error that leaves it.

        Raises:
            NoAgreementError: another rank failed.
        """
        self._begin()
        try:
            with OperatorWatch(self._before):
                yield
        except Exception as error:
            self._leave(told(error))
            raise

    def leave(self, why: str) -> None:
        """Tell the ranks that meet next why this one will not arrive."""
        self._begin()
        self._leave(why)

    def meet(self, group: str) -> None:
        """Wait for all members of a process group, or learn that one of them has failed."""
        try:
            self._exchange(group, members_of_groups()[group]).values(None)
        except AbsentRankError as error:
            raise NoAgreementError(str(error)) from error

    def _before(self, func: Any, arguments: list[Any]) -> None:
        if is_collective(func) and func._schema.name.partition("::")[2] not in MESSAGES:
            for group in groups_in(arguments):
                self.meet(group)

    def _begin(self) -> None:
        self._number += 1
        self._groups = {}

    def _leave(self, why: str) -> None:
        for group, members in members_of_groups().items():
            self._exchange(group, members).leave(why)

    def _exchange(self, group: str, members: list[int]) -> Exchange:
        if group not in self._groups:
            self._groups[group] = Exchange(f"plumbline meeting {self._number} {group}", members, PATIENCE_S)
        return self._groups[group]


def told(error: Exception) -> str:
    """Return what the other ranks are told about an error on this one."""
    if isinstance(error, OutOfMemoryError):
        return "no memory is left to run it again"
    return str(error) if isinstance(error, NoAgreementError) else f"{type(error).__name__}: {error}"
