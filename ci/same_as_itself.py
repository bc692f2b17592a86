"""Compares a trainer with itself repeatedly: no comparison may find a difference.

    python ci/same_as_itself.py                    # 20 comparisons in turns, into reports/same-as-itself.md
    python ci/same_as_itself.py --times 3 --subject reference --workloads perf-gpt

Every comparison is `plumbline compare --interleave SUBJECT SUBJECT`, as a user would type it. Run it on a quiet
machine. Exits with 1 if a figure was called better or worse, or if an outcome changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from plumbline.report.comparison.figure_changes import FALSE_ALARMS

REPORT = Path(__file__).resolve().parent.parent / "reports" / "same-as-itself.md"
WRONG = ("better", "worse")


def main() -> int:
    """Compare, count, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--subject", default="torch")
    parser.add_argument("--workloads", default="perf-mlp")
    parser.add_argument("--backends", default="none,ddp")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--report", type=Path, default=REPORT)
    asked = parser.parse_args()
    rows: list[Counter[str]] = []
    unclear: Counter[str] = Counter()
    for number in range(asked.times):
        told = compare(asked)
        figures = [(f"{one['metric']}", one["verdict"]) for one in told["figures"]]
        rows.append(Counter(verdict for _, verdict in figures))
        unclear.update(metric for metric, verdict in figures if verdict not in ("same", *WRONG))
        rows[-1]["outcomes changed"] = len(told["outcomes"])
        print(f"{number + 1} of {asked.times}: {told['headline']}", flush=True)
    page = table(asked, rows, unclear)
    asked.report.write_text(page, encoding="utf-8")
    print(page)
    return 1 if any(row[name] for row in rows for name in (*WRONG, "outcomes changed")) else 0


def compare(asked: argparse.Namespace) -> dict[str, Any]:
    """Return one comparison as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("workloads", "backends", "gpus", "launches")
        command = [
            sys.executable,
            "-m",
            "plumbline.cli.main",
            "compare",
            "--interleave",
            asked.subject,
            asked.subject,
            "--format",
            "json",
        ]
        command += [f"--{name}={getattr(asked, name)}" for name in options]
        command += ["--precisions=32", f"--report-dir={folder}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        told: dict[str, object] = json.loads(done.stdout)
    return told


def table(asked: argparse.Namespace, rows: list[Counter[str]], unclear: Counter[str]) -> str:
    """Return the report: the number of each verdict, by comparison and in total."""
    names = list(dict.fromkeys(["same", *WRONG, "inconclusive", *(name for row in rows for name in row)]))
    total = sum(rows, Counter())
    clean = sum(not any(row[name] for name in WRONG) for row in rows)
    lines = [
        "# A trainer against itself",
        "",
        f"`{asked.subject}` against `{asked.subject}`, {asked.times} comparisons in turns of {asked.launches} launches "
        f"each: workloads {asked.workloads}, backends {asked.backends}, {asked.gpus} gpus, float32, simulated devices, "
        f"torch {torch.__version__}.",
        f"No figure was called better or worse in {clean} of {asked.times} comparisons; a comparison promises to be "
        f"wrong in at most {FALSE_ALARMS:.0%}.",
        "",
        f"| comparison | {' | '.join(names)} |",
        f"| --- |{' --: |' * len(names)}",
        *(f"| {number + 1} | {' | '.join(str(row[name]) for name in names)} |" for number, row in enumerate(rows)),
        f"| all | {' | '.join(str(total[name]) for name in names)} |",
    ]
    if unclear:
        which = ", ".join(f"{metric} {count}" for metric, count in unclear.most_common())
        lines += ["", f"Without a verdict, by figure: {which}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
