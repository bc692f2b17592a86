"""Measures the limit of detection by precision, number of ranks and model size: a table and a picture.

    python ci/power_curve.py                    # measures what limits.jsonl lacks
    python ci/power_curve.py --minutes 5        # stops in time; run again to continue
    python ci/power_curve.py --draw             # only writes the table and the picture again

Writes `reports/detection-limit.jsonl`, the generated part of `reports/detection-limit.md`, and
`reports/images/detection-limit.svg`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from plumbline.core.cell import Cell
from plumbline.core.precision import PRECISIONS
from plumbline.core.topology import Topology
from plumbline.launch.pool import Pool
from plumbline.own_workloads.load import use_workloads
from plumbline.power import KINDS, measure
from plumbline.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "reports" / "detection-limit.jsonl"
PAGE, PICTURE = ROOT / "reports" / "detection-limit.md", ROOT / "reports" / "images" / "detection-limit.svg"
SIZES = Path(__file__).parent / "power_curve" / "sizes.py"
CONFIGURATIONS = (("power-small", 2), ("power-medium", 1), ("power-medium", 2), ("power-medium", 4), ("power-large", 2))
"""All sizes on two ranks, and all numbers of ranks with the medium size."""

PART = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- end -->)", re.DOTALL)
RUNS, TRAININGS = 100, 5
LINES = (("#3b6fb6", ""), ("#3b6fb6", "6 4"), ("#b65f3b", ""), ("#b65f3b", "6 4"), ("#5b8f5b", "2 3"))
"""The colour and the dashes of each kind; a solid line is for errors common to all tensors."""


def main() -> int:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    use_workloads([str(SIZES)])
    if not options.draw:
        _measure(time.monotonic() + 60 * options.minutes)
    rows = _results()
    if not rows:
        print("nothing is measured yet", file=sys.stderr)
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(rows), "utf-8")
    PAGE.write_text(PART.sub(lambda _: table(rows), PAGE.read_text("utf-8")), "utf-8")
    return 0


def _results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []


def _measure(until: float) -> None:
    known = {(row["workload"], row["ranks"], row["precision"]) for row in _results()}
    with closing(Pool("torch")) as pool, tempfile.TemporaryDirectory(prefix="plumbline-") as scratch:
        for workload, ranks in CONFIGURATIONS:
            for precision in PRECISIONS:
                if (workload, ranks, precision) in known or time.monotonic() > until:
                    continue
                backend = "ddp" if ranks > 1 else "none"
                cell = Cell("torch", workload, backend, Topology(1, ranks), precision, "cpu")
                cell = replace(cell, workload_locator=WORKLOADS[workload].locator)
                begun = time.monotonic()
                found = {
                    one.kind: one.limit
                    for one in measure(pool, cell, Path(scratch, "trace"), runs=RUNS, trainings=TRAININGS)
                }
                parameters = sum(one.numel() for one in WORKLOADS[workload].model().parameters())
                row = {
                    "workload": workload, "ranks": ranks, "precision": precision, "parameters": parameters,
                    "runs": RUNS, "trainings": TRAININGS, "seconds": round(time.monotonic() - begun, 1), **found,
                }  # fmt: skip
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row per cell."""
    kinds = list(KINDS)
    lines = [
        f"{RUNS} runs over {TRAININGS} trainings in each line.",
        "",
        f"![Smallest relative error that is caught in 99 of 100 runs](images/{PICTURE.name})",
        "",
        f"| precision | parameters | ranks | {' | '.join(kinds)} |",
        f"| --- | --: | --: | {' | '.join(['--:'] * len(kinds))} |",
    ]
    order = {name: number for number, name in enumerate(PRECISIONS)}
    for row in sorted(rows, key=lambda row: (order[row["precision"]], row["parameters"], row["ranks"])):
        limits = (f"{row[kind]:.1e}" if row[kind] is not None else "" for kind in kinds)
        lines.append(f"| {row['precision']} | {row['parameters']:,} | {row['ranks']} | {' | '.join(limits)} |")
    return "\n".join([*lines, ""])


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG of the limits over the number of parameters on two ranks, a line per kind and precision."""
    shown = [row for row in rows if row["ranks"] == 2]
    sizes = sorted({row["parameters"] for row in shown})
    precisions = [name for name in PRECISIONS if any(row["precision"] == name for row in shown)]
    low, high, width, height = -17.0, 0.0, 190, 300

    def x(panel: int, size: int) -> float:
        place = math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else 0.5
        return 60 + panel * (width + 20) + 15 + place * (width - 30)

    def y(error: float) -> float:
        return 30 + (high - math.log10(error)) / (high - low) * height

    parts = []
    for power in range(int(low), int(high) + 1, 2):
        at = y(10.0**power)
        right = 60 + len(precisions) * (width + 20) - 20
        parts.append(f'<line x1="60" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#8886"/>')
        parts.append(f'<text x="52" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for panel, precision in enumerate(precisions):
        parts.append(
            f'<text x="{60 + panel * (width + 20) + width / 2}" y="18" text-anchor="middle">{precision}</text>'
        )
        for size in sizes:
            parts.append(f'<text x="{x(panel, size):.1f}" y="{height + 48}" text-anchor="middle">{size:,}</text>')
        for kind, (colour, dashes) in zip(KINDS, LINES, strict=True):
            points = [
                f"{x(panel, row['parameters']):.1f},{y(row[kind]):.1f}"
                for row in sorted(shown, key=lambda row: row["parameters"])
                if row["precision"] == precision and row[kind]
            ]
            stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
            parts.append(f'<polyline points="{" ".join(points)}" {stroke}/>')
            parts += [
                f'<circle cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="3" fill="{colour}"/>'
                for point in points
            ]
    middle = 60 + (len(precisions) * (width + 20) - 20) / 2
    parts.append(f'<text x="{middle}" y="{height + 66}" text-anchor="middle">parameters of the model, two ranks</text>')
    for number, (kind, (colour, dashes)) in enumerate(zip(KINDS, LINES, strict=True)):
        left, base = 60 + (number % 3) * 260, height + 92 + 20 * (number // 3)
        stroke = f'stroke="{colour}" stroke-width="3" stroke-dasharray="{dashes}"'
        parts.append(f'<line x1="{left}" x2="{left + 30}" y1="{base - 4}" y2="{base - 4}" {stroke}/>')
        parts.append(f'<text x="{left + 36}" y="{base}">{kind}</text>')
    box = f'viewBox="0 0 {60 + max(len(precisions), 4) * (width + 20)} {height + 124}"'
    style = "<style>text{font:12px sans-serif;fill:#777}</style>"
    title = (
        "<title>The smallest relative error that is caught in 99 of 100 runs, over the parameters of a model</title>"
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {box}>{title}{style}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    sys.exit(main())
