"""Measures whether the time of writing a report grows faster than the number of its cells.

    python ci/bench_report.py [--cells 125 250 500 1000] [--rounds 5]
    python ci/bench_report.py --page [--cells 5000]

Prints the processor time per cell for each number of cells, relative to the first number, for runs in which no cell,
one in ten cells or every cell fails, for one of ten causes. Exits with 1 if a cell of the largest run takes more than
twice as long.

With `--page`, it prints how long it takes to make report.html of each run and, if there is a Chromium, to open it: the
median seconds over all rounds, and for making it also the processor time, which other work on the machine affects less.
This only measures, because the times depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from plumbline.core.cell import Cell
from plumbline.core.finding import ErrorGrid, Finding
from plumbline.core.outcome import Outcome
from plumbline.core.topology import Topology
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.formats import write_report
from plumbline.report.html.page import report_page
from plumbline.results.header_footer import Footer, Header
from plumbline.results.records import Result
from plumbline.results.run import read_run
from plumbline.results.run_writer import RunWriter

FINDINGS = 10
FAILURES = {"none fails": 0, "one in ten fails": 10, "all fail": 1}
"""The measured kinds of run: one of this many cells fails."""
CAUSES = 10
LARGEST_RATIO = 2.0


def main() -> int:
    """Measure each kind of run, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[125, 250, 500, 1000], metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--page", action="store_true", help="time only making report.html, and opening it in Chromium")
    options = parser.parse_args()
    if options.page:
        return time_pages(options.cells, options.rounds)
    print(f"| cells | {' | '.join(f'{count} cells' for count in options.cells)} |")
    print(f"|---|{'--:|' * len(options.cells)}")
    worst = 0.0
    for kind, every in FAILURES.items():
        with tempfile.TemporaryDirectory() as folder:
            runs = [write_run(Path(folder), count, every) for count in options.cells]
            write_report(runs[0])  # warm up: imports, and the compilation of templates
            times = [median(cpu_seconds(run) for _ in range(options.rounds)) for run in runs]
        per_cell = [seconds / count for seconds, count in zip(times, options.cells, strict=True)]
        ratios = [one / per_cell[0] for one in per_cell]
        worst = max(worst, ratios[-1])
        print(f"| {kind} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return int(worst > LARGEST_RATIO)


def time_pages(counts: Sequence[int], rounds: int) -> int:
    """Print how long it takes to make and to open the page of each run."""
    browser = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    print("| cells | of them | MB | made, s | processor time, s | opened, s | load average |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            for kind, every in FAILURES.items():
                path = write_run(Path(folder), count, every)
                wall, cpu = medians(page_seconds(path) for _ in range(rounds))
                page = path / "report.html"
                opened = "no Chromium"
                if browser:
                    opened = f"{median(open_seconds(browser, page) for _ in range(rounds)):.2f}"
                figures = f"{page.stat().st_size / 1e6:.1f} | {wall:.2f} | {cpu:.2f} | {opened}"
                print(f"| {count} | {kind} | {figures} | {os.getloadavg()[0]:.1f} |", flush=True)
    return 0


def medians(times: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the median wall time and the median processor time."""
    walls, used = zip(*times, strict=True)
    return median(walls), median(used)


def page_seconds(path: Path) -> tuple[float, float]:
    """Return the wall and processor time of making the page of a run that was read before."""
    run = read_run(path)
    begun, cpu = time.perf_counter(), time.process_time()
    (path / "report.html").write_text(report_page(run))
    return time.perf_counter() - begun, time.process_time() - cpu


def open_seconds(browser: str, page: Path) -> float:
    """Return the seconds to load and lay out a page, without the browser's own start and end."""
    probe = page.with_name("probe.html")
    # An outer page loads this page in a frame, forces its layout, and writes down the time.
    probe.write_text(
        "<!doctype html><p id=t></p><script>const begun = performance.now();</script>"
        f'<iframe width=1280 height=900 src={page.name} onload="this.contentDocument.body.getBoundingClientRect(); '
        't.textContent = (performance.now() - begun) / 1000"></iframe>'
    )
    with tempfile.TemporaryDirectory() as profile:
        shown = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom",
             f"--user-data-dir={profile}", probe.as_uri()],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    found = re.search(r"<p id=\"t\">([\d.]+)</p>", shown)
    assert found, "the browser did not open the page"
    return float(found[1])


def cpu_seconds(run: Path) -> float:
    """Return the processor time of writing a run's report."""
    begun = time.process_time()
    write_report(run)
    return time.process_time() - begun


def write_run(folder: Path, count: int, every: int) -> Path:
    """Write a run of ``count`` cells, of which one in ``every`` fails (0: none); return its folder."""
    topologies = [Topology(1, gpus) for gpus in (1, 2, 3, 4, 8)]
    cells = [
        Cell("reference", f"w{number // len(topologies)}", "ddp", topologies[number % len(topologies)], "32", "cpu")
        for number in range(count)
    ]
    header = Header.of(cells, command=["pytest"], options={}, fingerprint=Fingerprint(), simulated=True)
    results = [
        Result.of(cell, finding, f"pytest -k {cell.id}", 0.4)
        for number, cell in enumerate(cells)
        for finding in findings(number // every % CAUSES if every and number % every == 0 else None)
    ]
    with RunWriter(folder, header) as writer:
        writer.write(*results)
        writer.close(Footer.of(results, 0))
    return writer.path


def findings(cause: int | None) -> list[Finding]:
    """Return the findings of a cell: all passed, or failed for this cause; the first finding has errors."""
    outcome = Outcome.PASSED if cause is None else Outcome.FAILED
    error = 3.0 if cause is None else 4e6
    names = tuple(f"layers.{number}.weight" for number in range(24))
    grid = ErrorGrid(names, tuple(range(12)), tuple((error,) * 12 for _ in names))
    told: dict[str, Any] = {"error_x_noise": error, "limit_x_noise": 8.0, "step": 0}
    if cause is not None:
        told |= {"cause": f"mistake-{cause}", "family": "averaging", "parameter": names[0], "hint": "look there"}
    return [
        Finding(f"check{index}", outcome, "m" * 300, **told, error_grid=None if index else grid)
        for index in range(FINDINGS)
    ]


if __name__ == "__main__":
    sys.exit(main())
