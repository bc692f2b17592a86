"""Smoke test of a subject: trains tiny cells to find out whether the adapter or the trainer is wrong."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbline.core.backend import smoke_order
from plumbline.core.cell import Cell
from plumbline.core.errors import ADAPTER_WRONG, PlanError, SubjectError
from plumbline.core.invocation import command
from plumbline.core.outcome import Outcome
from plumbline.core.precision import PRECISIONS
from plumbline.core.training_behavior import TrainingBehavior, of_accelerator
from plumbline.devices.types import device_type
from plumbline.launch.pool import Pool
from plumbline.planning.devices import resolve_accelerator
from plumbline.planning.plan import smoke_workload
from plumbline.report.text import printable, printable_lines
from plumbline.subjects.load import parse_subject
from plumbline.workloads import WORKLOADS

if TYPE_CHECKING:
    from plumbline.engine.adapter_diagnosis import AdapterVerdict, SmokeEvidence
    from plumbline.evidence.trace import Trace

TIME_LIMIT = 30.0
"""Time limit of one cell in seconds, before it is extended for a slow machine."""

STARTS = 4
"""The time limit is extended by this many times the fork server's start-up time."""

EXCERPT_LINES = 12


def smoke(subject: str, accelerator: str) -> int:
    """Train tiny cells of a subject, print what is wrong, and return the exit code.

    Args:
        subject: the trainer, as for ``--subject``.
        accelerator: ``auto``, ``cpu``, or a type of device such as ``cuda``.

    Raises:
        PlanError: the file does not exist, or there are too few devices.
        SubjectError: the subject does not exist. A file that cannot be imported counts as a wrong adapter instead.
    """
    begun = time.monotonic()
    locator, python = _located(subject)
    accelerator, present = resolve_accelerator(accelerator)
    try:
        with closing(Pool(locator, python)) as pool:
            import torch  # in parallel with the pool's import

            torch.set_num_threads(1)  # as in the pytest plugin
            limit = TIME_LIMIT + STARTS * (time.monotonic() - begun)
            cells: dict[str, list[Cell]] = defaultdict(list)
            for declared in pool.subjects:
                cells[declared["name"]] += cells_of(declared, accelerator, present)
            _refuse_too_few_devices(pool.subjects, cells, accelerator, present)
            untried: dict[str, list[str]] = defaultdict(list)
            for declared in pool.subjects:
                untried[declared["name"]] += untried_of(declared, accelerator, cells[declared["name"]])
            return max(try_in_turn(pool, own, limit, untried[name]) for name, own in cells.items())
    except SubjectError as error:
        place, _, name = locator.partition("::")
        if not place.endswith(".py") or (name and f"has no subject {name!r}" in str(error)):
            raise
        print(f"The adapter is wrong: {printable_lines(str(error).removeprefix('--subject '))}")
        return ADAPTER_WRONG


def _located(subject: str) -> tuple[str, str | None]:
    locator, python = parse_subject(subject)
    place = locator.partition("::")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise PlanError(f"file {place} not found; `{command('plumbline', 'new-subject', place)}` writes an example")
    return locator, python


def cells_of(declared: Mapping[str, Any], accelerator: str, present: float = math.inf) -> list[Cell]:
    """Return a cell for each declared backend and for each declared precision, simplest first.

    Ranks can share the ``present`` devices, but the replicas of one rank cannot. A backend that needs more devices
    for one rank is left out.
    """
    behavior = TrainingBehavior.of(declared.get("conduct", {}))
    asked = [one for one in smoke_order() if one.name in declared["backends"]]
    backends = [one for one in asked if one.smallest.num_nodes <= (behavior.max_nodes or math.inf)]
    if accelerator != "cpu":
        backends = [one for one in backends if one.devices_per_process(one.smallest) <= present]
    precisions = sorted(of_accelerator(declared["precisions"], accelerator), key=_simplest_first)
    pairs = [(backend, precision) for backend in backends for precision in precisions[:1]]
    pairs += [(backend, precision) for backend in backends[:1] for precision in precisions[1:]]
    own = "lm-tokens" if behavior.own_loss else "adapter" if behavior.adapters_only else None
    name = declared["name"]
    return [
        Cell(
            name,
            own or smoke_workload(backend, behavior.stages_per_rank),
            backend.name,
            backend.smallest,
            precision,
            accelerator,
        )
        for backend, precision in pairs
    ]


def untried_of(declared: Mapping[str, Any], accelerator: str, cells: Sequence[Cell]) -> list[str]:
    """Return the declared capabilities, and the declared pairs of backend and precision, that no cell tries."""
    needed = frozenset[str]().union(*(WORKLOADS[cell.workload].needs for cell in cells))
    tried = {(cell.backend, cell.precision) for cell in cells}
    missing: dict[str, list[str]] = {}
    for backend in declared["backends"]:
        others = [one for one in of_accelerator(declared["precisions"], accelerator) if (backend, one) not in tried]
        if others:
            missing.setdefault(" and ".join(others), []).append(backend)
    capabilities = sorted(frozenset(declared["capabilities"]) - needed)
    parts = [f"{' and '.join(backends)} in precision {precisions}" for precisions, backends in missing.items()]
    return [*capabilities, *parts]


def _simplest_first(name: str) -> tuple[bool, bool, bool]:
    precision = PRECISIONS[name]
    return precision.scaled, precision.autocast is not None, precision.storage != "float32"


def _refuse_too_few_devices(
    subjects: Sequence[Mapping[str, Any]], cells: Mapping[str, list[Cell]], accelerator: str, present: int
) -> None:
    for declared in subjects:
        if not cells[declared["name"]] and cells_of(declared, accelerator):
            raise PlanError(
                f"the replicas of {declared['name']} need {device_type(accelerator).one} each, but this machine "
                f"has {present}: simulate devices with --accelerator cpu"
            )


def try_in_turn(pool: Pool, cells: list[Cell], limit: float = TIME_LIMIT, untried: Sequence[str] = ()) -> int:
    """Test the cells until one is wrong, print the diagnosis, and return the exit code.

    ``limit`` is the time limit of one cell in seconds; ``untried`` is the result of ``untried_of``.
    """
    from plumbline.engine.adapter_diagnosis import diagnose, refused

    if not cells:
        print("The adapter is wrong: @subject(...) declares no backend, no precision, or too few nodes.")
        return ADAPTER_WRONG
    tried: list[Cell] = []
    for cell in cells:
        folder = Path(tempfile.mkdtemp(prefix="plumbline-smoke-"))
        evidence = _evidence(pool, cell, folder, limit)
        verdict = diagnose(evidence)
        if tried:
            verdict = refused(verdict, evidence, tried[0])
        if verdict.code or not tried:
            _print_verdict(cell, verdict)
        if verdict.code:
            _print_log(evidence, folder)
            return verdict.code
        shutil.rmtree(folder, ignore_errors=True)
        tried.append(cell)
    if len(tried) > 1:
        others = ", ".join(f"{cell.backend} {cell.topology} {cell.precision}" for cell in tried[1:])
        print(f"  Also right: {others}.")
    if untried:
        print(f"  Declared, but not tried: {'; '.join(untried)}.")
    return 0


def _evidence(pool: Pool, cell: Cell, folder: Path, limit: float) -> SmokeEvidence:
    from plumbline.engine.adapter_diagnosis import SmokeEvidence
    from plumbline.engine.examine import verdict
    from plumbline.launch.cell_launch import behavior_of
    from plumbline.workloads import find

    trace = _trained(pool, cell, folder, limit)
    initial = dict(find(cell.workload, cell.seed).model().state_dict())
    return SmokeEvidence(cell, trace, verdict(trace, cell, behavior_of(pool, cell)).findings, initial)


def _trained(pool: Pool, cell: Cell, folder: Path, limit: float) -> Trace:
    from plumbline.devices.counting import count
    from plumbline.launch.cell_launch import Settings, launch

    oversubscribe = cell.accelerator != "cpu" and count(cell.accelerator) < cell.topology.devices
    return launch(pool, cell, folder, Settings(limit, oversubscribe))


def _print_verdict(cell: Cell, verdict: AdapterVerdict) -> None:
    devices = "simulated" if cell.accelerator == "cpu" else device_type(cell.accelerator).label
    place = f"{cell.backend} on {cell.topology} {devices} devices"
    print(f"{cell.subject}: {cell.workload}, {place}, precision {cell.precision}")
    for sentence in verdict.sentences:
        print(f"  {printable(sentence)}")


def _print_log(evidence: SmokeEvidence, folder: Path) -> None:
    broken = next((finding for finding in evidence.findings if finding.check == "launch"), None)
    rank = broken.rank if broken and broken.rank is not None else 0
    log = folder / f"rank-{rank}.log"
    if broken and log.exists():
        end = evidence.trace.exits.get(rank)
        stack = end.stack.splitlines() if end and end.outcome is Outcome.TIMED_OUT else []
        for line in stack or excerpt(log.read_text(errors="replace")):
            print(f"    {' ' * (len(line) - len(line.lstrip()))}{printable(line)}")
    print(f"  log: {log}")


def excerpt(log: str) -> list[str]:
    """Return the first lines of the first traceback in a rank's log, without the harness's own frame.

    Without a traceback, return the first lines of the log.
    """
    lines = log.partition("Traceback (most recent call last):\n")[2].splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if len(frames) > 1:
        del lines[: frames[1]]
    shown = [line.rstrip() for line in lines or log.splitlines() if set(line) - set(" ^~")]
    return shown[:EXCERPT_LINES] + (["…"] if len(shown) > EXCERPT_LINES else [])
