"""Formats the overhead of trainers over a hand-written loop: a row per strategy, a column per trainer."""

from __future__ import annotations

from collections.abc import Iterable

from plumbline.results.records import Measurement


def table(measurements: Iterable[Measurement]) -> list[str]:
    """Return the lines of a Markdown table, or no lines if no overhead was measured.

    An entry is a trainer's time relative to the hand-written loop in paired rounds, with 95 % bounds. It is
    ``unstable`` if the bounds are too far apart, and empty if the trainer does not have the strategy.
    """
    rows: dict[str, dict[str, str]] = {}
    for one in measurements:
        if one.metric == "overhead":
            strategy = f"{one.workload} {one.backend} {one.num_nodes}x{one.gpus} {one.precision}"
            rows.setdefault(strategy, {})[one.subject] = _figure(one)
    subjects = list(dict.fromkeys(subject for row in rows.values() for subject in row))
    body = [[strategy, *(row.get(subject, "") for subject in subjects)] for strategy, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(["", *subjects], *body, strict=True)]
    lines = [["", *subjects], ["-" * width for width in widths], *body]
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines] if rows else []


def _figure(one: Measurement) -> str:
    return "unstable" if one.value is None else f"× {one.value:.3f} ({one.low:.3f} … {one.high:.3f})"
