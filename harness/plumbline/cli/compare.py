"""``plumbline compare``: what changed between two runs, or between the backends, precisions or gpus of one."""

from __future__ import annotations

import argparse
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.core.exit_codes import TROUBLE, USAGE
from plumbline.report.comparison.alignment import DIMENSIONS, NotAligned
from plumbline.report.comparison.comparison import DEFAULT_GATES, GATES, compare_runs, compare_within, failing_gates
from plumbline.report.comparison.output import FORMATS
from plumbline.report.comparison.significance import MINIMUM_EFFECT

if TYPE_CHECKING:
    from plumbline.report.comparison.comparison import Comparison
    from plumbline.results.run import Run


def add_to(commands: Any) -> None:
    gates = "\n".join(f"  {gate.code}  {name}: {gate.description}" for name, gate in GATES.items())
    command = commands.add_parser(
        "compare",
        help="compare two runs, or the cells of one: outcomes, speed, memory",
        description=inspect.getdoc(compare),
        epilog=f"exit codes, of what --fail-on names the first that applies:\n{gates}\n"
        f"  0  none of them\n  {TROUBLE}  a run cannot be read\n  {USAGE}  invalid command line",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("a", metavar="A", help="folder of the first run (the baseline); with --interleave a subject")
    command.add_argument("b", metavar="B", nargs="?", help="folder of the second run; with --interleave a subject")
    command.add_argument(
        "--by", choices=tuple(DIMENSIONS), help="compare cells of run A that differ only in this; A is the first value"
    )
    command.add_argument(
        "--fail-on",
        metavar="WHAT,…",
        type=_gates,
        default=DEFAULT_GATES,
        help=f"some of {', '.join(GATES)} (default: {','.join(DEFAULT_GATES)})",
    )
    command.add_argument(
        "--minimum-effect",
        metavar="PERCENT",
        type=_percent,
        default=MINIMUM_EFFECT,
        help="minimum relative change to report, in percent (default: 5)",
    )
    measure = command.add_argument_group("to measure two trainers with interleaved launches")
    measure.add_argument(
        "--interleave",
        action="store_true",
        help="A and B are subjects, as for --subject: alternate their launches",
    )
    measure.add_argument(
        "--launches", type=int, default=10, metavar="N", help="launches of each trainer for each cell (default: 10)"
    )
    measure.add_argument("--gpus", type=int, metavar="N", help="maximum number of devices")
    for name, example in (("backends", "dp,ddp"), ("precisions", "32,bf16"), ("workloads", "perf-mlp")):
        measure.add_argument(f"--{name}", type=_names, metavar="A,B", help=f"for example {example} (default: all)")
    measure.add_argument("--accelerator", choices=("auto", "cuda", "cpu"), default="auto", help="cpu simulates devices")
    measure.add_argument("--report-dir", metavar="DIR", help="where both runs are written (default: reports/)")
    command.add_argument("--format", choices=tuple(FORMATS), default=next(iter(FORMATS)), help="(default: text)")
    command.set_defaults(do=compare)


def compare(options: argparse.Namespace) -> int:
    """Compare two runs, or the cells of one: outcomes first, then speed and memory, each with a verdict.

      plumbline compare reports/A reports/B            two runs
      plumbline compare reports/A --by backend         cells of one run: dp, ddp, ddp2
      plumbline compare --interleave SUBJECT SUBJECT   two trainers, measured alternately on this machine

    A figure is better, worse, the same, or inconclusive, given the launches of both sides and a minimum effect.
    It is not comparable where the machine or the workload's definition differs; the difference is named.
    """
    comparison = _comparison(options)
    gates = failing_gates(comparison, options.fail_on)
    code = GATES[gates[0]].code if gates else 0
    print(FORMATS[options.format](comparison, gates, code))
    return code


def _comparison(options: argparse.Namespace) -> Comparison:
    from plumbline.results.run import read_run

    if options.interleave:
        return compare_runs(*_interleaved(options), options.minimum_effect)
    if (options.b is None) == (options.by is None):
        given = "both a second run and --by" if options.by else "neither a second run nor --by"
        raise NotAligned(f"{given}: compare A with B, or the cells of A --by {', '.join(DIMENSIONS)}")
    if options.by:
        return compare_within(read_run(Path(options.a)), options.by, options.minimum_effect)
    return compare_runs(read_run(Path(options.a)), read_run(Path(options.b)), options.minimum_effect)


def _interleaved(options: argparse.Namespace) -> tuple[Run, Run]:
    from rich.console import Console
    from rich.text import Text

    from plumbline.engine.interleave import interleave

    if options.b is None or options.by is not None:
        raise NotAligned("--interleave needs two subjects, A and B, and no --by")
    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:
        a, b = interleave(options, lambda text: status.update(Text(text)))
    console.print(f"A is {a.path}, B is {b.path}", markup=False, soft_wrap=True)
    return a, b


def _names(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _gates(given: str) -> tuple[str, ...]:
    names = _names(given)
    for name in names:
        if name not in GATES:
            raise argparse.ArgumentTypeError(f"there is no {name!r}: use {', '.join(GATES)}")
    return names


def _percent(given: str) -> float:
    try:
        percent = float(given)
    except ValueError:
        percent = math.nan
    if not 0 < percent < 100:
        raise argparse.ArgumentTypeError(f"{given} is not a percentage between 0 and 100")
    return percent / 100
