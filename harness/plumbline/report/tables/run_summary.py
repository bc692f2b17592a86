"""A whole run in words: the verdict, its notes and gaps, its devices, machine, software and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd

from plumbline.core.backend import BACKENDS
from plumbline.core.numbers import counted, x_noise
from plumbline.core.outcome import Outcome
from plumbline.machine.fingerprint import Fingerprint
from plumbline.report.tables.cells import DECLINED, MISSING, measured_only, outcome_counts
from plumbline.report.tables.failures import is_wrong, mistakes
from plumbline.report.text import digits, in_words, listed, printable, settings_in_words
from plumbline.results.records import KNOWN, UNEXPECTED_PASS, CellRecord, grouped
from plumbline.results.run import Run

SIMULATED: Final = "simulated"
NOT_ABOUT_GPUS: Final = "Devices are simulated: the figures are for this CPU and say nothing about GPUs."
MOST_SUBJECTS: Final = 2
MOST_MISTAKES: Final = 3

_BAD = {
    Outcome.FAILED.value: "failed",
    Outcome.CRASHED.value: "crashed",
    Outcome.TIMED_OUT.value: "timed out",
    Outcome.ERRORED.value: "ended without a verdict",
    UNEXPECTED_PASS: "should have failed and did not",
}


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run: ``sentence``, and ``detail``, a second sentence, which may be empty.

    ``kind`` is ``unclear`` where nothing went wrong, but something has no answer.
    """

    kind: Literal["good", "bad", "unclear"]
    sentence: str
    detail: str = ""


def verdict_of(run: Run, cells: pd.DataFrame) -> RunVerdict:
    counts = outcome_counts(cells["outcome"])
    tried = len(cells) - sum(counts.get(name, 0) for name in DECLINED)
    timed = measured_only(run)
    unmeasured = len({one.coordinates for one in run.results if one.coordinates in timed and is_wrong(one)})
    measured = len(timed - {one.coordinates for one in run.results if one.outcome is Outcome.UNSUPPORTED})
    bad = {words: counts[name] for name, words in _BAD.items() if name in counts}
    if bad or unmeasured:
        each = ", ".join(f"{count} {words}" for words, count in bad.items())
        sentences = [f"{sum(bad.values())} of {counted(tried, 'cell')} went wrong: {each}."] if bad else []
        if len(bad) == 1:
            sentences = [f"{count} of {counted(tried, 'cell')} {words}." for words, count in bad.items()]
        sentences += [f"{unmeasured} of {counted(measured, 'measurement')} failed."] if unmeasured else []
        found = mistakes_in_words(run)
        return RunVerdict("bad", found or " ".join(sentences), " ".join(sentences) if found else "")
    if not tried:
        sentence = f"{counted(measured, 'cell')} measured, none examined." if measured else "Nothing was examined."
        return RunVerdict("unclear", sentence)
    if missing := counts.get(MISSING, 0):
        sentence = f"{missing} of {counted(tried, 'cell')} {'has' if missing == 1 else 'have'} no result."
        return RunVerdict("unclear", sentence, "Nothing went wrong in the others.")
    if run.incomplete:
        return RunVerdict("unclear", "The run did not finish.", _how_cells_ended(counts))
    sentence = "Nothing unexpected happened in" if KNOWN in counts else "Nothing went wrong in"
    detail = " ".join(filter(None, [_how_cells_ended(counts), _largest_error(run)]))
    return RunVerdict("good", f"{sentence} {counted(tried, 'cell')}.", detail)


def _largest_error(run: Run) -> str:
    """Return a sentence with the largest error of a gradient that passed; "" if none was compared."""
    right = (one for one in run.results if one.check == "gradients" and one.outcome is Outcome.PASSED)
    error = max((one.error_x_noise for one in right if one.error_x_noise is not None), default=None)
    return "" if error is None else f"The largest error of a gradient that passed is {x_noise(error)}."


def mistakes_in_words(run: Run) -> str:
    """Return the number of mistakes of each subject and the names of the commonest; "" if no subject makes any."""
    found = mistakes(run)
    if len(found) > MOST_SUBJECTS:
        return f"{counted(sum(map(len, found.values())), 'mistake')} in {len(found)} trainers."
    return " ".join(
        f"{counted(len(groups), 'mistake')} in {printable(subject)}: "
        f"{listed([group.in_words for group in groups], MOST_MISTAKES)}."
        for subject, groups in found.items()
    )


def notes(run: Run) -> list[str]:
    noted = (one for one in run.results if one.check == "launch" and one.outcome is Outcome.PASSED)
    found = grouped(noted, lambda one: (one.subject, one.message.partition(". ")[0].partition("\n")[0]))
    return [
        f"note on {counted(len(results), 'cell')} of {printable(subject)}, for example {results[0].cell}: "
        f"{printable(results[0].message.partition(chr(10))[0])}"
        for (subject, _), results in found.items()
    ]


def what_is_missing(run: Run, cells: pd.DataFrame) -> str | None:
    """Return a sentence on why the run, with these cells, is incomplete; None for a complete run."""
    if not run.incomplete:
        return None
    reasons = []
    if run.footer is None:
        reasons.append("the run has no footer (it stopped early, or is still running)")
    if run.torn:
        reasons.append("its last record is truncated")
    if missing := outcome_counts(cells["outcome"]).get(MISSING):
        reasons.append(f"{missing} of {counted(len(cells), 'cell')} without a complete result")
    if unmeasured := sum(planned.measured for planned in run.missing):
        reasons.append(f"{counted(unmeasured, 'cell')} without the planned measurements")
    return f"INCOMPLETE: {'; '.join(reasons)}."


def devices(run: Run, accelerator: str) -> str:
    if run.header.simulated or accelerator == "cpu":
        return SIMULATED
    return printable(run.header.fingerprint.key.device or accelerator)


def computed_by(run: Run) -> list[str]:
    records: tuple[CellRecord, ...] = (*run.header.planned, *run.results, *run.measurements)
    return list(dict.fromkeys(devices(run, record.accelerator) for record in records))


def facts(run: Run) -> dict[str, str]:
    header, settings = run.header, run.header.options.get("settings")
    found = {
        "run": header.run_id,
        "started": f"{header.started:%Y-%m-%d %H:%M} UTC",
        "took": in_words((run.footer.finished - header.started).total_seconds(), "s") if run.footer else "",
        "machine": machine_in_words(header.fingerprint),
        "software": software_in_words(run),
        "command": " ".join(header.command),
        "settings": settings_in_words(settings).removeprefix("settings of ") if isinstance(settings, dict) else "",
    }
    return {name: value for name, value in found.items() if value}


def software_in_words(run: Run) -> str:
    machine = run.header.fingerprint
    versions = [f"plumbline {run.header.plumbline}"]
    versions += [f"{name} {value}" for name in ("torch", "python") if (value := getattr(machine, name))]
    return ", ".join(versions)


def machine_in_words(machine: Fingerprint) -> str:
    hardware = [f"{machine.key.cpu_cores or '?'} cores of {machine.key.cpu or 'an unknown cpu'}"]
    if machine.key.accelerator not in ("", "cpu"):
        hardware.insert(0, f"{machine.key.device_count or '?'} × {machine.key.device or 'an unknown device'}")
    return ", ".join(hardware)


def seed_in_words(run: Run) -> str:
    seed = run.header.options.get("seed")
    return "the workload's own" if seed is None else str(seed)


def micro_batches_in_words(run: Run) -> list[str]:
    names = dict.fromkeys(cell.backend for cell in (*run.header.planned, *run.results))
    dividing = [BACKENDS[name] for name in names if name in BACKENDS and BACKENDS[name].micro_batches > 1]
    return [f"{one.name}: each replica splits its batch into {one.micro_batches} micro-batches" for one in dividing]


def backend_in_words(name: str) -> str:
    return "one device" if name == "none" else name


def comparability(machine: Fingerprint) -> dict[str, str]:
    """Return what must be equal for two runs' figures to be comparable, as far as it is known of the machine."""
    return {name.replace("_", " "): str(value) for name, value in machine.key.model_dump().items() if value is not None}


def other_facts(run: Run) -> dict[str, str]:
    machine = run.header.fingerprint
    found = {name: value for name in ("platform", "python", "torch", "pandas") if (value := getattr(machine, name))}
    found |= {"plumbline's commit": machine.commit or ""}
    found |= {"compute capability": machine.compute_capability or "", "cpu governor": machine.cpu_governor or ""}
    found |= {name: digits(value) for name, value in machine.clocks_and_load.items()}
    found |= machine.environment
    found |= {f"subject {name}": str(software) for name, software in run.header.subjects.items()}
    for name, code in run.header.code.items():
        found |= {f"source of subject {name}": (code.sha256 or "")[:12], f"commit of subject {name}": code.commit or ""}
    found |= {f"workload {name}": f"{one.locator} {one.sha256[:12]}" for name, one in run.header.workloads.items()}
    for name, value in run.header.options.items():
        if value not in (None, False):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)
            found[f"--{name.replace('_', '-')}"] = shown
    return {name: value for name, value in found.items() if value}


def _how_cells_ended(counts: Mapping[str, int]) -> str:
    ways = {
        Outcome.PASSED.value: "match one device",
        Outcome.DEVIATES.value: "match what their backend specifies, which differs from one device",
        KNOWN: "failed as expected",
    }
    found = [f"{counts[name]} {words}" for name, words in ways.items() if name in counts]
    return f"{', '.join(found)}." if found else ""
