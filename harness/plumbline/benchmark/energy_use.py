"""The energy that a launch's devices consumed in its timed rounds, read by the parent between rounds.

The counters are those of the whole device, also while it waits for another one. Reading them takes no rank's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from plumbline.evidence.timing import RankTiming
from plumbline.machine.energy import COUNTER_PERIOD_S, Counters, NoEnergyError

LEAST_ROUND_S: Final = 10 * COUNTER_PERIOD_S
"""In a round of this length a counter that is one period late at either end is wrong by a tenth."""


class EnergyUse:
    """Adds up what the devices consume between ``begin_round`` and ``end_round``; ``read`` returns their counters."""

    def __init__(self, read: Callable[[], Counters]) -> None:
        self._read = read
        self._joules: Counters = {}
        self._before: Counters = {}
        self._why = ""

    def begin_round(self) -> None:
        self._before = self._counters()

    def end_round(self) -> None:
        for uuid, now in self._counters().items():
            if uuid in self._before:
                self._joules[uuid] = self._joules.get(uuid, 0.0) + now - self._before[uuid]

    def of(self, ranks: Sequence[RankTiming]) -> float | str:
        if self._why:
            return self._why
        used = {uuid for rank in ranks for uuid in rank.devices}
        if not used:
            return "this version of torch does not report the UUIDs of devices"
        if missing := sorted(used - self._joules.keys()):
            return f"{missing[0]} has no energy counter (NVML has one for Volta and newer, not for parts of a device)"
        rounds = zip(*(rank.rounds for rank in ranks), strict=True)
        shortest = min((max(one.seconds for one in each) for each in rounds), default=0.0)
        if shortest < LEAST_ROUND_S:
            return (
                f"a round takes {shortest:.2g} s, but energy counters may update only every {COUNTER_PERIOD_S:g} s: "
                f"rounds of at least {LEAST_ROUND_S:g} s are needed"
            )
        return sum(self._joules[uuid] for uuid in used)

    def _counters(self) -> Counters:
        try:
            return self._read()
        except NoEnergyError as error:
            self._why = str(error)
            return {}
