"""Whether the figures of two runs may be held against each other, and if not, what differs.

Outcomes may always be: what a trainer computes does not depend on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.header_footer import Header
from harness.results.records import Measurement


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on both sides."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.what}: {self.a} against {self.b}"


def machines_differ(a: Header, b: Header) -> tuple[Difference, ...]:
    """Return what makes the figures of two runs incomparable: the machine, or how its devices were used."""
    before, after = a.fingerprint.key.model_dump(), b.fingerprint.key.model_dump()
    before["devices"], after["devices"] = _devices(a), _devices(b)
    before["oversubscribe"], after["oversubscribe"] = (bool(side.options.get("oversubscribe")) for side in (a, b))
    return _unequal(before, after)


def software_differs(a: Header, b: Header) -> tuple[Difference, ...]:
    """Return what else is not the same, and may explain a change without making figures incomparable."""
    return _unequal(_software(a), _software(b))


def _software(header: Header) -> dict[str, object]:
    machine = header.fingerprint
    # How busy the machine was is never twice the same, and says nothing by being different.
    found: dict[str, object] = machine.model_dump(exclude={"key", "environment", "packages", "clocks_and_load"})
    subjects = list(header.subjects.values())
    return {
        **found,
        "plumbline": header.plumbline,
        "seed": header.options.get("seed"),
        "subject": ", ".join(sorted({f"{one.library} {one.version}" for one in subjects if one.library})) or None,
        "subject's torch": ", ".join(sorted({one.torch for one in subjects if one.torch})) or None,
        **machine.packages,
        **machine.environment,
    }


def definitions_differ(a: Measurement, b: Measurement, *, one_run: bool) -> tuple[Difference, ...]:
    """Return what makes two figures incomparable: the metric's definition, or the workload's.

    Within one run there is one definition of a workload; its key differs with the number of devices, which is asked.
    """
    names = ("unit", "better") if one_run else ("workload_key", "unit", "better")
    return _unequal({name: getattr(a, name) for name in names}, {name: getattr(b, name) for name in names})


def _devices(header: Header) -> str:
    return "simulated" if header.simulated else "real"


def _unequal(a: dict[str, object], b: dict[str, object]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name.replace("_", " "), _said(a.get(name)), _said(b.get(name)))
        for name in dict.fromkeys((*a, *b))
        if a.get(name) != b.get(name)
    )


def _said(value: object) -> str:
    return "nothing" if value is None else str(value)
