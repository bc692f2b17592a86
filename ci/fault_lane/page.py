"""The page with the table of an examination."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch

from fault_lane.fault import Tally
from fault_lane.left import Leftovers
from fault_lane.soak import Soak
from plumbline.report.text import markdown, shortened

_HEAD = """# Faults

Faults that were injected for real, and how Plumbline reacted: {command}. Torch {torch}, Python {python}, {cores} cores,
load averages of up to {load:.1f} (including its own).
A fault is *right* if everything that must be seen was seen, and if the next cell on the same warm pool ends with
bitwise the same weights as on a fresh pool. *Left behind* counts processes (also those in their own sessions),
{shared}folders in the temporary directory, listening sockets, and descriptors of this process.

| row | fault | must be seen | times | verdict right | left behind | s |
|---|---|---|---|---|---|---|
"""
_LONGEST = 160


def page(tallies: Sequence[Tally], soaked: Soak | None, alone: bool, command: str) -> str:
    """Return Markdown; with ``alone``, /dev/shm belongs to this examination, so its leftovers count."""
    head = _HEAD.format(
        command=command,
        load=max((tally.load for tally in tallies), default=0.0),
        torch=torch.__version__,
        python=platform.python_version(),
        cores=os.cpu_count(),
        shared="entries of /dev/shm, " if alone else "",
    )
    lines = [head.rstrip("\n")]
    lines += map(_line, tallies)
    done = [tally for tally in tallies if not tally.skipped]
    times, right = sum(tally.times for tally in done), sum(tally.right for tally in done)
    left = sum((tally.left for tally in done), Leftovers())
    lines += ["", f"In all {len(done)} faults, injected {times} times: {right} right, left behind: {left}.", ""]
    wrong = [tally for tally in done if tally.wrong]
    if wrong:
        lines += ["## Not right", ""]
        lines += [f"- {tally.name}: {markdown(shortened(said, 100))}" for tally in wrong for said in tally.wrong]
        lines.append("")
    return "\n".join(lines + (_soak(soaked) if soaked else []))


def _line(tally: Tally) -> str:
    figures = [str(tally.times), str(tally.right), str(tally.left), f"{tally.seconds:.0f}"]
    if tally.skipped:
        figures = ["0", "–", f"not possible here: {tally.skipped}", "–"]
    return "| " + " | ".join([str(tally.row), tally.name, markdown(shortened(tally.must, _LONGEST)), *figures]) + " |"


def _soak(soaked: Soak) -> list[str]:
    last = soaked.readings[-1]
    head = f"{last.launches} launches of a right trainer on two ranks, one after another, on one pool: "
    head += f"{last.seconds:.0f} s, the longest launch {soaked.longest:.1f} s, {len(soaked.alarms)} false alarms."
    head += " *Kept* is this process's memory after the allocator has released what is free."
    lines = ["## Soak", "", head, ""]
    lines += [
        "| launches | s | processes | descriptors | the server's | /dev/shm | folders | MiB | kept | the server's |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for one in soaked.readings:
        figures = [one.launches, f"{one.seconds:.0f}", one.processes, one.descriptors, one.server_descriptors]
        figures += [one.shared_memory, one.folders, f"{one.memory:.0f}", f"{one.kept:.0f}", f"{one.server_memory:.0f}"]
        lines.append("| " + " | ".join(map(str, figures)) + " |")
    return [*lines, "", *(f"- {markdown(alarm)}" for alarm in soaked.alarms)]
