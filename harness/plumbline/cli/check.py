"""``plumbline check``: check a user's training script, unmodified."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.cli.arguments import IGNORE, IGNORE_HELP, at_least, declare, duration, path
from plumbline.core.errors import TROUBLE, PlanError
from plumbline.report.output_file import refuse_unwritable, write_output

if TYPE_CHECKING:
    from plumbline.check.verdict.windows import WindowJudge


def add_to(commands: Any) -> None:
    add = declare(commands, "check", check, usage="plumbline check [options] -- COMMAND …")
    flag = partial(add, action="store_true")
    add("--steps", type=at_least(1), default=4, metavar="K", help="steps of each optimizer to record (default: 4)")
    skipped = "skip the first N steps of each optimizer (default: 0)"
    add("--after", type=at_least(0), default=0, metavar="N", help=skipped)
    later = "after that, record one step in N, judge it while training continues, and print a line to standard error"
    add("--every", type=at_least(2), default=0, metavar="N", help=later)
    resumed = "interrupt the training after K steps, resume it, and compare it with one that is not interrupted; write "
    resumed += "{folder} in COMMAND where it names the folder for checkpoints"
    add("--resume-after", type=at_least(1), default=0, metavar="K", help=resumed)
    again = "the command line that resumes the training (default: COMMAND again)"
    add("--resume-command", default="", metavar="LINE", help=again)
    flag("--stop-when-wrong", help="stop the script as soon as a recorded step is judged wrong")
    flag("--stop", help="stop the script after the recorded steps (default: let it finish)")
    add(
        "--time-limit",
        type=duration,
        metavar="S",
        help="stop the command after S seconds and judge what it has recorded",
    )
    sample = "judge only this fraction or this number of each optimizer's parameters (default: all)"
    add("--sample-parameters", type=sample_size, default=0.0, metavar="FRACTION|N", help=sample)
    truth = "precision in which gradients are recomputed to measure rounding noise (default: %(default)s)"
    add("--truth", choices=("float64", "float32"), default="float64", help=truth)
    declared = "judge whether each step optimises this objective over all its ranks and micro-batches"
    add("--objective", choices=("token-mean", "sample-mean", "sum"), default="", help=declared)
    split = "repeat the first step with its samples moved to other ranks and micro-batches, and compare gradients"
    flag("--resplit", help=split)
    cost = "take a few steps, print what recording K steps would cost in time, memory and disk space, and stop"
    flag("--dry-run", help=cost)
    flag("--require-full", help="exit with code 2 if less than 99 %% of the gradients and updates could be judged")
    modules = "import a module first, for example one that registers causes (repeatable)"
    add("-p", dest="modules", action="append", default=[], metavar="MODULE", help=modules)
    file = partial(add, type=path, metavar="FILE")
    file("--html", help="write the verdict as a self-contained HTML page")
    file("--json", help="write the verdict as JSON; with --dry-run, the estimate")
    file("--sarif", help="write errors as SARIF, for code scanning")
    every = "write the verdict to a folder in every form: verdict.html, .json, .sarif and .md, code-quality.json for "
    every += "GitLab, and badge.svg"
    add("--report-dir", type=path, metavar="DIR", help=every)
    flag("--github", help="print errors as GitHub Actions annotations on standard error")
    flag("-q", "--quiet", help="print only the first line of the verdict if it is RIGHT")
    flag(IGNORE, help=IGNORE_HELP)
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command that starts the training")


def check(options: argparse.Namespace) -> int:
    """Run a training script unmodified, record its first optimizer steps on every rank, and check them.

    The script's output is passed through. The verdict follows on standard error. Options that are repeated on every
    command line, and the command itself, may be in ``[tool.plumbline.check]`` of ``pyproject.toml``.

    Exit code: 0 nothing is wrong, 1 the training is wrong, 2 nothing could be judged or the script failed (the verdict
    has the script's exit code), 4 invalid command line, 130 interrupted before anything wrong was found.
    """
    from plumbline.check.command.running import command_in
    from plumbline.check.evidence.options import RecordingOptions
    from plumbline.check.report.files import make_folder

    command = command_in(options.command)
    if options.dry_run and (options.html or options.sarif or options.report_dir or options.github):
        raise PlanError(
            "--dry-run gives no verdict: remove --html, --sarif, --report-dir and --github, or use --json for the "
            "estimate"
        )
    if options.dry_run and options.require_full:
        raise PlanError("--dry-run judges nothing, so it cannot be combined with --require-full")
    if options.every and (options.stop or options.dry_run):
        raise PlanError("--every follows the whole training, so it cannot be combined with --stop or --dry-run")
    if options.resplit and (options.after or options.every or options.dry_run):
        raise PlanError(
            "--resplit trains the first step again, so it cannot be combined with --after, --every or --dry-run"
        )
    others = (options.every, options.stop_when_wrong, options.resplit, options.dry_run, options.after)
    if options.resume_after and any(others):
        raise PlanError(
            "--resume-after cannot be combined with --every, --stop-when-wrong, --resplit, --after or --dry-run"
        )
    if options.resume_command and not options.resume_after:
        raise PlanError("--resume-command needs --resume-after K")
    for name in ("html", "json", "sarif"):
        if (file := getattr(options, name)) is not None:
            refuse_unwritable(f"--{name}", file)
    for name, needs in (("--html", ["jinja2"]), ("--json", ["pydantic"]), ("--report-dir", ["pydantic", "jinja2"])):
        missing = [module for module in needs if importlib.util.find_spec(module) is None]
        if missing and getattr(options, name[2:].replace("-", "_")):
            raise PlanError(f"{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if options.report_dir:
        make_folder(options.report_dir)
    sys.path.insert(0, os.getcwd())
    try:
        for name in options.modules:
            importlib.import_module(name)
    except Exception as error:
        raise PlanError(f"-p {name}: cannot import this module: {type(error).__name__}: {error}") from error
    finally:
        del sys.path[0]
    if options.dry_run:
        return _dry_run(command, options)
    from plumbline.check.command.checked_command import run_and_judge

    names = {one.name for one in fields(RecordingOptions)}
    given = {name: value for name, value in vars(options).items() if name in names}
    follows = options.every or options.stop_when_wrong
    judge_in = partial(_judge_in, options) if follows else None
    recording = RecordingOptions(**given, splits=options.resplit)
    if options.resume_after:
        from plumbline.check.command.checked_command import run_interrupted

        again = command_in(["--", *shlex.split(options.resume_command)]) if options.resume_command else command
        checked = run_interrupted(command, again, recording, options.resume_after, _say, options.time_limit)
    else:
        checked = run_and_judge(command, recording, options.time_limit, judge_in)
    checked = replace(checked, settings=options.settings)
    # These modules import torch, which happens while the command runs.
    from plumbline.check.report.files import write_files, write_report
    from plumbline.check.report.terminal import verdict_screen
    from plumbline.check.verdict.verdict import verdict_of

    verdict = verdict_of(checked, require_full=options.require_full)
    _print(verdict_screen(checked, verdict, **_form(), quiet=options.quiet))
    if options.github:
        from plumbline.check.report.lines import annotations_on, unjudged_annotation
        from plumbline.report.annotations import github_commands

        if commands := github_commands([*annotations_on(checked), *unjudged_annotation(verdict)]):
            _print(commands)
    write_files(checked, verdict, html=options.html, json=options.json, sarif=options.sarif)
    if options.report_dir:
        write_report(options.report_dir, checked, verdict)
    return verdict.exit_code


def _dry_run(command: list[str], options: argparse.Namespace) -> int:
    from plumbline.check.command.checked_command import run_and_judge
    from plumbline.check.evidence.options import RecordingOptions
    from plumbline.check.judge.estimate import PLAIN_STEPS
    from plumbline.check.report.terminal import dry_run_screen
    from plumbline.check.verdict.obstacles import why_no_estimate

    recording = RecordingOptions(1, options.after + PLAIN_STEPS, stop=True, dry_run=True)
    checked = run_and_judge(command, recording, options.time_limit)
    _print(dry_run_screen(checked, options.steps, **_form()))
    why = why_no_estimate(checked)
    code = 0 if why is None else TROUBLE
    if options.json is not None:
        from plumbline.check.report.json_file import dry_run_json

        write_output(options.json, dry_run_json(checked, options.steps, why, code))
    return code


def _form() -> dict[str, Any]:
    is_terminal = sys.stderr.isatty()
    colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": min(shutil.get_terminal_size().columns, 100) if is_terminal else 80, "colour": colour}


def _judge_in(options: argparse.Namespace, folder: Path) -> WindowJudge:
    from plumbline.check.verdict.windows import WindowJudge

    return WindowJudge(folder, options.after, _say, stop_when_wrong=options.stop_when_wrong)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(screen: str) -> None:
    print(f"\n{screen}", file=sys.stderr, flush=True)


def sample_size(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if 0 < value < 1 or (value >= 1 and value.is_integer()):
            return value
    raise argparse.ArgumentTypeError(f"must be a fraction between 0 and 1, or a whole number, not {text}")
