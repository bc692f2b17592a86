"""The failures that searches of one subject found, on disk: the state for the next search, and a page for each."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import plumbline.subjects
from plumbline.core.backend import declared_for
from plumbline.core.cell import Cell
from plumbline.core.invocation import suite_command
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.core.training_behavior import of_accelerator
from plumbline.hunt.program.problem import NotExpressedError, Problem
from plumbline.hunt.program.run_program import (
    NoTemplateError,
    ProgramRun,
    Shown,
    command_of,
    render,
    render_by_hand,
    run_program,
)
from plumbline.hunt.search import Drawn, Failure, in_words, name_of, write_problem
from plumbline.planning.declaration import Declaration
from plumbline.results.files import write_text
from plumbline.workloads.generated import Recipe


@dataclass(frozen=True)
class Found:
    """A failure as it was found, with the finding's message."""

    cause: str
    drawn: Drawn
    message: str


class Corpus:
    """The folder of one subject's failures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found = folder / "found.jsonl"
        self._progress = folder / "progress.json"

    def add(self, failure: Failure) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        recipe, cell = failure.drawn.recipe, failure.drawn.cell
        locator = write_problem(recipe, self.folder, found=f": {failure.cause} on {cell.backend} {cell.topology}")
        told = {"message": failure.finding.message, "error_x_noise": failure.finding.error_x_noise}
        line = {"cause": failure.cause, "cell": asdict(cell), "recipe": asdict(recipe), **told}
        with self._found.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return Path(locator.partition("::")[0])

    def __iter__(self) -> Iterator[Found]:
        """Yield the failures in the order in which they were found."""
        if self._found.exists():
            for line in self._found.read_text("utf-8").splitlines():
                values = json.loads(line)
                recipe = Recipe(**{**values["recipe"], "layers": tuple(values["recipe"]["layers"])})
                yield Found(values["cause"], Drawn(recipe, Cell.from_json(values["cell"])), values["message"])

    @property
    def causes(self) -> set[str]:
        return {found.cause for found in self}

    @property
    def progress(self) -> Counter[str]:
        """Counts over all searches; ``rounds`` is the next seed."""
        return Counter(json.loads(self._progress.read_text("utf-8"))) if self._progress.exists() else Counter()

    def went_on(self, counts: Mapping[str, int]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self._progress, json.dumps(self.progress + Counter(counts), indent=1) + "\n")


EXPECTED = {
    "checkpoint": "A training that is interrupted and resumed ends with the same weights as one that was not.",
    "metrics": "The loss that is reported is the mean over the samples.",
    "validation": "Each held-out sample is used in every evaluation that is due.",
    "samples": "Each sample is used once an epoch, on one rank, in the requested order.",
    "ranks-agree": "All ranks have the same weights after each step.",
    "launch": "The training ends without an exception.",
}
OTHERWISE = "Each step computes what one device computes from the samples of all ranks."
SHIPPED = Path(plumbline.subjects.__file__).parent  # the folder of the adapters and trainers that come with Plumbline


@dataclass(frozen=True)
class WrittenUp:
    """The page of a failure, and what its program showed; None if there is no program."""

    page: Path
    shown: Shown | None


def write_up(failure: Failure, declared: Sequence[Declaration], subject: str, python: str, folder: Path) -> WrittenUp:
    """Write a failure's page and program next to its file in ``folder``; run the program with ``python``."""
    recipe, cell, finding = failure.drawn.recipe, failure.drawn.cell, failure.finding
    declaration = declared_for(cell.subject, cell.backend, declared)
    name = name_of(recipe)
    again = ["plumbline", "hunt", "--subject", subject, "--folder", str(folder), "--again"]
    given = ["--subject", subject, "--workload", str(folder / f"{name}.py"), "--gpus", str(cell.topology.devices)]
    given += ["--nodes", str(cell.topology.num_nodes)] if cell.topology.num_nodes > 1 else []
    of_the_cell = ["--backends", cell.backend, "--precisions", cell.precision]
    values: dict[str, object] = {
        "title": f"{_library(declaration)}: {failure.cause} ({cell.backend}, {counted(cell.processes, 'rank')})",
        "versions": declaration.software,
        "cell": cell,
        "ranks": counted(cell.processes, "rank"),
        "recipe": in_words(recipe),
        "expected": EXPECTED.get(finding.check, OTHERWISE),
        "message": finding.message,
        "cause": finding.cause or "unexplained",
        "far": "" if finding.error_x_noise is None else f", {finding.error_x_noise:.3g} times rounding noise",
        "again": "\n".join(map(shlex.join, (again, [*suite_command(*given), *of_the_cell]))),
        "refusal": None,
    }
    problem = Problem(recipe, cell, finding).visible(of_accelerator(declaration.precisions, cell.accelerator))
    file = folder / f"{name}-program.py"
    shown = None
    try:
        for tried in problem.orders():
            run, shown = _run(tried, declaration, file, python)
            values |= {"verdict": _verdict(run, shown, tried.differences)}
            if shown is not Shown.NO:
                break
        values |= {
            "program": file.read_text("utf-8"),
            "command": shlex.join(command_of(Path(file.name), processes_of(declaration, cell))),
            "output": "\n".join(filter(None, [run.printed, run.error])) or "(nothing)",
        }
    except NotExpressedError as error:
        file.unlink(missing_ok=True)
        values |= {"refusal": str(error), "advice": None, "program": None}
        if isinstance(error, NoTemplateError):
            values |= {"advice": error.advice}
            with suppress(NotExpressedError):
                values |= {"program": render_by_hand(problem, "The weights that one device ends with.")}
            if _folder(declaration) == SHIPPED and not declaration.software.library:
                values |= {"refusal": "the trainer is a part of Plumbline", "advice": None}
    page = folder / f"{name}.md"
    environment = Environment(
        loader=PackageLoader("plumbline.hunt", ""), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page.write_text(environment.get_template("page.md.jinja").render(values) + "\n", "utf-8")
    return WrittenUp(page, shown)


def _run(problem: Problem, declaration: Declaration, file: Path, python: str) -> tuple[ProgramRun, Shown]:
    processes = processes_of(declaration, problem.cell)
    command = shlex.join(command_of(Path(file.name), processes))
    title = f"{_library(declaration)} fails the check of {problem.finding.check}. Run:\n\n    {command}\n"
    file.write_text(render(problem, _folder(declaration), title), "utf-8")
    run = run_program(file, processes, python, _folder(declaration) / "programs" / problem.cell.subject)
    if run.exit_code is None and problem.finding.outcome is Outcome.TIMED_OUT:
        return run, Shown.YES
    return run, run.shows(problem.finding.message if problem.raises else None)


def _folder(declaration: Declaration) -> Path:
    return Path(declaration.source[0]).parent if declaration.source else Path()


def processes_of(declaration: Declaration, cell: Cell) -> int:
    """Return the number of processes of a program: one per rank, or one if the subject starts several nodes' ranks."""
    return 1 if declaration.launch == "node" and cell.topology.num_nodes > 1 else cell.processes


def _verdict(run: ProgramRun, shown: Shown, differences: str) -> str:
    ended = "It did not end in time" if run.exit_code is None else f"It ends with exit code {run.exit_code}"
    says = {
        Shown.YES: "and shows the deviation without Plumbline",
        Shown.NO: "and shows no deviation. **Not confirmed without Plumbline**",
        Shown.BROKE: "for another reason. **Not confirmed without Plumbline**",
    }
    otherwise = f" (it {differences})" if differences else ""
    return f"{ended}, {says[shown]}{otherwise}:"


def _library(declaration: Declaration) -> str:
    software = declaration.software
    return f"{software.library} {software.version}" if software.library else declaration.name
