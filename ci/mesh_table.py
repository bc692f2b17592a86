"""Makes a table of which trainers are right on which meshes, from cells on simulated devices, in reports/meshes.md.

    python ci/mesh_table.py                                        # all of SUBJECTS, one after another in one run
    python ci/mesh_table.py --subject torch --subject deepspeed    # only these
    python ci/mesh_table.py --run reports/latest                   # write the page of an existing run

Released libraries are trained in their own environments, which are created if they are missing, as by ``plumbline
subjects install``. Margins come from the last table of the page of ``pytest suites/detection`` (``--detection``).
Prints the table. Exits with 1 if there is a failure that is not a known one of its library.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from plumbline.core.backend import BACKENDS, Held
from plumbline.core.numbers import compact, counted
from plumbline.core.outcome import Outcome
from plumbline.report.markdown import findings_section, known_section, run_facts
from plumbline.report.tables.cells import cell_table, counts_in_words, mark_and_share
from plumbline.report.tables.failures import wrong_cells
from plumbline.report.tables.support import MARKS
from plumbline.report.text import markdown
from plumbline.results.records import Result
from plumbline.results.run import Run, read_run
from plumbline.subjects.virtual_environments import install, parse_requirement
from plumbline.workloads import EVERY

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "meshes.md"
RUNS = ROOT / "reports" / "meshes"
DETECTION = ROOT / "reports" / "detection.md"
MARGINS = "where ranks hold parts of a model or of a sequence:"
"""The line before the margins of meshes on the detection suite's page."""

SUBJECTS = {
    "reference": None,
    "torch": None,
    "deepspeed": "0.19.8",
    "fabric": "2.6.6",
    "trl": "1.16.0",
    "sentence-transformers": "6.2.0",
    "ray": "2.60.0",
    "composer": "0.32.1",
}
"""The subjects of the table, with the release of those that have their own environment."""

WORKLOADS = {
    "mlp": "any difference is a mistake",
    "lm-tokens": "token means of unequal lengths",
    "transformer": "a tied embedding and head",
    "clipping-tied": "one norm over the whole model, which clips at some steps",
    "accumulation": "windows of several micro-batches, the last one shorter",
    "experts": "experts and a router",
    "checkpoint-elastic": "saved on one mesh, resumed on another",
    "checkpoint-experts": "the same with experts",
}
"""The workloads of the table, and the reason for each."""

PRECISIONS = ("32", "bf16")
DEVICES = 4


def main() -> int:
    """Run the subjects on all meshes, or read their runs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=list(SUBJECTS), help="run only this one (repeatable)")
    parser.add_argument("--backends", metavar="A,B", help="only these meshes (default: those where ranks hold parts)")
    parser.add_argument("--run", action="append", type=Path, help="use this run instead of starting one (repeatable)")
    parser.add_argument("--detection", type=Path, default=DETECTION, help="with the margins (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the page is written (default: %(default)s)")
    arguments = parser.parse_args()
    paths = arguments.run or list(new_runs(arguments.subject or list(SUBJECTS), arguments.backends))
    runs = [read_run(path) for path in paths]
    written = page(runs, margins(arguments.detection.read_text()))
    arguments.report.write_text(written)
    print(support(cells := cells_of(runs), runs))
    print(f"In all: {counts_in_words(cells['outcome'])}")
    return 1 if any(wrong_cells(run) for run in runs) else 0


def new_runs(subjects: Iterable[str], backends: str | None) -> Iterable[Path]:
    """Run the subjects on the meshes of ``DEVICES``, and on those that need more devices; yield the runs' folders."""
    locators = [f"--subject={locator(name)}" for name in subjects]
    if backends is None:
        meshes = [one for one in BACKENDS.values() if any(each.splits != {Held.SAMPLES} for each in one.dimensions)]
    else:
        meshes = [BACKENDS[name] for name in backends.split(",")]
    larger = [one for one in meshes if one.smallest.devices > DEVICES]
    for devices, asked in ((DEVICES, [one for one in meshes if one not in larger]), (2 * DEVICES, larger)):
        if asked:
            selection = {
                "nodes": "1",  # simulated nodes differ from a single one only in the ranks' environment
                "gpus": str(devices),
                "backends": ",".join(one.name for one in asked),
                "workloads": ",".join(WORKLOADS),
                "precisions": ",".join(PRECISIONS),
            }
            options = [f"--{name}={value}" for name, value in selection.items()]
            options.append(f"--report-dir={RUNS.relative_to(ROOT)}")
            command = [sys.executable, "-m", "pytest", "suites/conformance", "-q", *options, *locators]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            if code not in (0, 1):  # 1: something failed; its results say what
                raise SystemExit(f"pytest ended with {code}: no table is written")
            yield (RUNS / "latest").resolve()


def locator(name: str) -> str:
    """Return the ``--subject`` argument for a subject in its environment, which is created if it is missing."""
    version = SUBJECTS[name]
    if version is None:
        return name
    return f"{name};python={install(parse_requirement(f'{name}=={version}'), print)}"


def cells_of(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the cells of all runs, one row each."""
    return pd.concat([cell_table(run) for run in runs], ignore_index=True)


def page(runs: Sequence[Run], margins: str) -> str:
    """Return the page."""
    cells = cells_of(runs)
    absent = [name for name in SUBJECTS if name not in set(cells["subject"])]
    blocks = [
        "# Trainers on meshes",
        "Made by `python ci/mesh_table.py`, on simulated devices: processes on the CPU. No figure is about speed.",
        *map(run_facts, runs),
        "Workloads: " + "; ".join(f"`{name}`: {why}" for name, why in WORKLOADS.items()) + ".",
        support(cells, runs),
        "Each entry is a mark and the share of trained cells that are right; it is empty if none was requested. "
        + counts_in_words(cells["outcome"])
        + ".",
        f"Not in these runs: {', '.join(absent)}." if absent else "",
        "\n".join(f"- `{sign}`: {meaning}" for sign, meaning in MARKS.items()),
        "## What went wrong",
        *dict.fromkeys(map(findings_section, runs)),
        *dict.fromkeys(block for run in runs for block in known_section(run)),
        "## Documented deviations",
        deviating(runs),
        "## Unsupported cells",
        "[Released trainers](../docs/released-trainers.md) says how subjects without a mesh handle a request for one.",
        unsupported(runs),
        "## Margins",
        "The largest error of right cells in these runs, in multiples of rounding noise:",
        right_errors(cells),
        "Known-bad and known-good trainers on meshes, from `pytest suites/detection`, in multiples of the largest "
        "error that a right trainer may show:",
        margins,
    ]
    # Leave the paths of this checkout and of the environments out.
    return re.sub(
        r"python=[^ ;|`\"']*/", "python=PATH/", "\n\n".join(filter(None, blocks)).replace(f"{ROOT}/", "") + "\n"
    )


def support(cells: pd.DataFrame, runs: Sequence[Run]) -> str:
    """Return the table of subjects and meshes."""
    software = {name: what for run in runs for name, what in run.header.subjects.items()}
    meshes = [name for name in BACKENDS if name in set(cells["backend"])]
    rows = []
    for subject, own in cells.groupby("subject", sort=False):
        version = getattr(software.get(str(subject)), "version", None)
        by_mesh = dict(iter(own.groupby("backend")))
        rows.append(
            [
                f"{subject} {version or ''}".strip(),
                *(mark_and_share(by_mesh[name]) if name in by_mesh else "" for name in meshes),
            ]
        )
    return table(["subject", *meshes], rows)


def deviating(runs: Sequence[Run]) -> str:
    """Return which workloads deviate on which meshes, and what they compute differently from one device."""
    found: dict[str, list[Result]] = {}
    for result in (result for run in runs for result in run.results):
        if result.outcome is Outcome.DEVIATES:
            found.setdefault(result.workload, []).append(result)
    rows = []
    for workload, results in found.items():
        places = ", ".join(dict.fromkeys(f"{one.subject} {one.backend}" for one in results))
        rows.append([workload, str(len({one.cell for one in results})), EVERY[workload].exposes, places])
    return table(["workload", "cells", "because it exposes", "where"], rows) if rows else "Nothing."


def unsupported(runs: Sequence[Run]) -> str:
    """Return why cells are not trained: each subject's reasons, with the meshes."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in (result for run in runs for result in run.results):
        if result.outcome is Outcome.UNSUPPORTED:
            found.setdefault((result.subject, result.message), []).append(result)
    rows = [
        [subject, ", ".join(dict.fromkeys(one.backend for one in results)), str(len(results)), reason]
        for (subject, reason), results in found.items()
    ]
    return table(["subject", "meshes", "cells", "recorded reason"], rows)


def right_errors(cells: pd.DataFrame) -> str:
    """Return the largest error of right cells by mesh and precision."""
    right = cells[cells["outcome"].isin((Outcome.PASSED.value, Outcome.DEVIATES.value))]
    largest = right.groupby(["backend", "precision"])["error_x_noise"].agg(["max", "count"])
    rows = []
    for name in (name for name in BACKENDS if name in set(right["backend"])):
        found = {
            precision: largest.loc[(name, precision)] for precision in PRECISIONS if (name, precision) in largest.index
        }
        rows.append(
            [
                name,
                *(
                    f"{compact(found[p]['max'])} ({counted(int(found[p]['count']), 'cell')})" if p in found else ""
                    for p in PRECISIONS
                ),
            ]
        )
    return table(["mesh", *PRECISIONS], rows)


def margins(detection: str) -> str:
    """Return the margins of meshes from the detection suite's page."""
    _, found, after = detection.partition(MARGINS)
    if not found:
        raise SystemExit(f"the page of the detection suite has no line '{MARGINS}': run pytest suites/detection")
    return after.strip()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *([markdown(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
