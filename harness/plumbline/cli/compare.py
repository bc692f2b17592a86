"""``plumbline compare``: compare two runs, or the cells of one."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

from plumbline.cli.arguments import ACCELERATOR, IGNORE, IGNORE_HELP, names, print_error
from plumbline.core.errors import TROUBLE, USAGE, UsageError
from plumbline.report.comparison.alignment import DIMENSIONS
from plumbline.report.comparison.compare import DEFAULT_GATES, GATES, compare_runs, compare_within, failing_gates
from plumbline.report.comparison.figure_changes import MINIMUM_EFFECT
from plumbline.report.comparison.output import FORMATS
from plumbline.report.text import settings_in_words
from plumbline.results.run import Run, read_run


def add_to(commands: Any) -> None:
    gates = "\n".join(f"  {gate.code}  {name}: {gate.description}" for name, gate in GATES.items())
    command = commands.add_parser(
        "compare",
        description=inspect.getdoc(compare),
        epilog=f"exit code: that of the first --fail-on condition that applies\n{gates}\n"
        f"  0  no condition applies\n  {TROUBLE}  a run cannot be read\n  {USAGE}  invalid command line",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(do=compare)
    add = command.add_argument
    add("a", metavar="A", help="folder of the first run (the baseline); with --interleave a subject")
    add("b", metavar="B", nargs="?", help="folder of the second run; with --interleave a subject")
    add("--by", choices=tuple(DIMENSIONS), help="compare the cells of run A that differ only in this")
    fail_on = f"conditions that set the exit code: {', '.join(GATES)} (default: {','.join(DEFAULT_GATES)})"
    add("--fail-on", metavar="WHAT,…", type=conditions, default=DEFAULT_GATES, help=fail_on)
    least = "report changes of at least this many percent (default: 5)"
    add("--minimum-effect", metavar="PERCENT", type=percentage, default=MINIMUM_EFFECT, help=least)
    measure = command.add_argument_group("options of --interleave").add_argument
    subjects = "A and B are subjects, as for --subject: measure them in alternating launches"
    measure("--interleave", action="store_true", help=subjects)
    measure("--launches", type=int, default=10, metavar="N", help="launches of each trainer per cell (default: 10)")
    measure("--gpus", type=int, metavar="N", help="maximum number of devices")
    for name, example in (("backends", "dp,ddp"), ("precisions", "32,bf16"), ("workloads", "perf-mlp")):
        measure(f"--{name}", type=names, metavar="A,B", help=f"{name} to measure, for example {example} (default: all)")
    measure("--accelerator", **ACCELERATOR, help="type of device; cpu simulates devices (default: auto)")
    measure("--report-dir", metavar="DIR", help="folder for both runs (default: reports/)")
    add("--format", choices=tuple(FORMATS), default=next(iter(FORMATS)), help="output format (default: text)")
    add(IGNORE, action="store_true", help=IGNORE_HELP)


def compare(options: argparse.Namespace) -> int:
    """Compare two runs, or the cells of one: outcomes first, then speed and memory, each with a verdict.

      plumbline compare reports/A reports/B            two runs
      plumbline compare reports/A --by backend         cells of one run: dp, ddp, ddp2
      plumbline compare --interleave SUBJECT SUBJECT   two trainers, measured alternately on this machine

    Each figure is better, worse, the same or inconclusive, given the launches of both sides and the minimum effect.
    Figures from different machines, or from different definitions of a workload, are not compared.
    """
    if options.settings:
        print_error(settings_in_words(options.settings))
    if options.interleave:
        comparison = compare_runs(*_interleaved(options), options.minimum_effect)
    elif (options.b is None) == (options.by is None):
        raise UsageError(f"give either a second run or --by {{{','.join(DIMENSIONS)}}}")
    elif options.by:
        comparison = compare_within(read_run(Path(options.a)), options.by, options.minimum_effect)
    else:
        comparison = compare_runs(read_run(Path(options.a)), read_run(Path(options.b)), options.minimum_effect)
    gates = failing_gates(comparison, options.fail_on)
    code = GATES[gates[0]].code if gates else 0
    print(FORMATS[options.format](comparison, gates, code))
    return code


def _interleaved(options: argparse.Namespace) -> tuple[Run, Run]:
    from rich.console import Console
    from rich.text import Text

    from plumbline.engine.interleave import interleave

    if options.b is None or options.by is not None:
        raise UsageError("--interleave needs two subjects, A and B, and no --by")
    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:
        a, b = interleave(options, lambda text: status.update(Text(text)))
    console.print(f"A is {a.path}, B is {b.path}", markup=False, soft_wrap=True)
    return a, b


def conditions(given: str) -> tuple[str, ...]:
    chosen = names(given)
    for name in chosen:
        if name not in GATES:
            raise argparse.ArgumentTypeError(f"unknown condition {name!r}; choose from {', '.join(GATES)}")
    return chosen


def percentage(given: str) -> float:
    percent = float(given)
    if not 0 < percent < 100:
        raise argparse.ArgumentTypeError(f"must be between 0 and 100, not {given}")
    return percent / 100
