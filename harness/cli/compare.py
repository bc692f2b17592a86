"""``plumbline compare``: what changed between two runs, or between the backends, precisions, gpus of one."""

from __future__ import annotations

import argparse
import inspect
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.errors import PlanError
from harness.core.exit_codes import TROUBLE, USAGE
from harness.report.comparison.align import PARTS, NotAligned
from harness.report.comparison.gates import GATES, USUAL, caught

if TYPE_CHECKING:
    from harness.report.comparison.comparison import Comparison
    from harness.results.run import Run

LEAST_COLUMNS = 100


def add_to(commands: Any) -> None:
    """Say how the command is called."""
    told = "what changed between two runs, or within one: outcomes, speed, memory"
    gates = "\n".join(f"  {gate.code}  {name}: {gate.told}" for name, gate in GATES.items())
    command = commands.add_parser(
        "compare",
        help=told,
        description=inspect.getdoc(compare),
        epilog=f"exit codes, for what --fail-on names, the first that applies:\n{gates}\n"
        f"  0  none of them\n  {TROUBLE}  a run cannot be read\n  {USAGE}  the command line makes no sense",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("a", metavar="A", help="a run's folder: what was before; with --interleave a subject")
    command.add_argument("b", metavar="B", nargs="?", help="another run's folder: what is now; or a subject")
    command.add_argument(
        "--by", choices=tuple(PARTS), help="compare the cells of run A that differ in this alone; the first value is A"
    )
    command.add_argument(
        "--fail-on",
        metavar="WHAT,…",
        type=_gates,
        default=USUAL,
        help=f"some of {', '.join(GATES)} (default: {','.join(USUAL)})",
    )
    command.add_argument(
        "--minimum-effect", metavar="PERCENT", type=_percent, default=0.05, help="what is smaller is no change (5)"
    )
    measure = command.add_argument_group("to measure two trainers in turns")
    measure.add_argument(
        "--interleave", action="store_true", help="A and B are subjects, as for pytest --subject: measure them in turns"
    )
    measure.add_argument("--launches", type=int, default=10, metavar="N", help="of each, for each cell (10)")
    measure.add_argument("--gpus", type=int, metavar="N", help="budget of devices")
    for name, example in (("backends", "dp,ddp"), ("precisions", "32,bf16"), ("workloads", "perf-mlp")):
        measure.add_argument(f"--{name}", type=_names, metavar="A,B", help=f"for example {example} (all)")
    measure.add_argument("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="cpu simulates devices")
    measure.add_argument("--report-dir", metavar="DIR", help="where both runs go (reports/)")
    command.add_argument("--format", choices=("text", "md", "json"), default="text", help="(default: text)")
    command.set_defaults(do=compare)


def compare(options: argparse.Namespace) -> int:
    """Compare two runs, or the cells of one: outcomes first, then speed and memory, each with its verdict.

      plumbline compare reports/A reports/B            two runs
      plumbline compare reports/A --by backend         the cells of one: dp against ddp against ddp2
      plumbline compare --interleave SUBJECT SUBJECT   two trainers, measured in turns on this machine

    A figure is better, worse, the same, or inconclusive, from the launches of both sides and a minimum effect;
    it is not comparable where the machine or the workload's definition differs, and then what differs is said.
    """
    from harness.results.errors import RunNotFound

    try:
        comparison = _compared(options)
    except (NotAligned, PlanError, RunNotFound) as error:
        print(f"plumbline compare: {error}", file=sys.stderr)
        return USAGE
    gates = caught(comparison, options.fail_on)
    code = GATES[gates[0]].code if gates else 0
    print(_shown(comparison, options.format, gates, code))
    return code


def _compared(options: argparse.Namespace) -> Comparison:
    from harness.report.comparison.comparison import compare_runs, compare_within
    from harness.results.run import read_run

    if options.interleave:
        return compare_runs(*_interleaved(options), options.minimum_effect)
    if (options.b is None) == (options.by is None):
        given = "both a second run and --by" if options.by else "neither a second run nor --by"
        raise NotAligned(f"{given}: compare A with B, or the cells of A --by {', '.join(PARTS)}")
    if options.by:
        return compare_within(read_run(Path(options.a)), options.by, options.minimum_effect)
    return compare_runs(read_run(Path(options.a)), read_run(Path(options.b)), options.minimum_effect)


def _interleaved(options: argparse.Namespace) -> tuple[Run, Run]:
    from rich.console import Console
    from rich.text import Text

    from harness.engine.interleave import interleave

    if options.b is None or options.by is not None:
        raise NotAligned("--interleave measures two subjects, A and B, and has no --by")
    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:
        a, b = interleave(options, lambda said: status.update(Text(said)))
    console.print(f"A is {a.path}, B is {b.path}", markup=False, soft_wrap=True)
    return a, b


def _shown(comparison: Comparison, form: str, gates: list[str], code: int) -> str:
    from harness.report.comparison.json_document import document
    from harness.report.comparison.markdown import page
    from harness.report.comparison.terminal import for_terminal

    if form == "json":
        return document(comparison, gates, code)
    if form == "md":
        return page(comparison).rstrip("\n")
    width = max(LEAST_COLUMNS, shutil.get_terminal_size((LEAST_COLUMNS, 24)).columns)
    return for_terminal(comparison, width, colour=sys.stdout.isatty())


def _names(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _gates(given: str) -> tuple[str, ...]:
    names = _names(given)
    for name in names:
        if name not in GATES:
            raise argparse.ArgumentTypeError(f"there is no {name!r}: there are {', '.join(GATES)}")
    return names


def _percent(given: str) -> float:
    try:
        percent = float(given)
    except ValueError:
        percent = math.nan
    if not 0 < percent < 100:
        raise argparse.ArgumentTypeError(f"{given} is not a per cent between 0 and 100")
    return percent / 100
