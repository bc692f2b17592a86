"""The support table: what a user would type, and whether the evidence of this run says that it is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import pandas as pd

from harness.core.backend import BACKENDS, columns
from harness.core.outcome import Outcome
from harness.core.precision import PRECISIONS
from harness.report.tables.cells import DECLINED, MISSING, cell_table
from harness.report.tables.summary import devices
from harness.report.tables.undeclared import undeclared_kinds, unsupported
from harness.results.records import KNOWN, UNEXPECTED_PASS
from harness.results.run import Run

REFERENCE: Final = "reference"
"""The subject whose configurations are written as the old documentation wrote them."""

FACT_COLUMNS: Final = ("Command", "Cells passed", "Deviates", "Worst × noise", "Devices")

MARKS: Final = {
    "Y": "every cell behind the row passed",
    "C": "contract: not everywhere what one device computes, but exactly what the backend promises",
    "K": "known: what went wrong was expected to, and the reasons stand below",
    "N": "at least one check failed that nobody expected to fail",
    "X": "unexpected pass: something was expected to fail and did not, so what is expected is out of date",
    "?": "nothing failed, but at least one cell gave no verdict "
    "(it errored, crashed, ran out of time, was skipped, or is missing)",
    "-": "the subject says that it does not do this",
}

IN_A_WORD: Final = {
    "Y": "passed",
    "C": "as the contract says",
    "K": "known to fail",
    "N": "failed",
    "X": "unexpected pass",
    "?": "no verdict",
    "-": "unsupported",
}

NOT_TRIED: Final = (*DECLINED, MISSING)
_PRECISION_ORDER = ("32", "16", "bf16", "64")


def mark_columns() -> tuple[str, ...]:
    """Return the columns that describe configurations and hold their marks; backends bring theirs."""
    return ("1 GPU", "1+ GPUs", *columns(), "Nodes", "16-bit")


def support_columns() -> tuple[str, ...]:
    """Return all columns of the table."""
    return (*mark_columns(), *FACT_COLUMNS)


def rare_columns() -> tuple[str, ...]:
    """Return the columns that are there only where a row has a mark for them: few trainers have these backends."""
    return tuple(column for column, rare in columns().items() if rare)


@dataclass(frozen=True)
class Configuration:
    """What a user would type, with the numbers of gpus and nodes left open. A row of the table.

    Every cell has exactly one configuration, also one with a backend or a precision not known here.
    """

    subject: str
    backend: str
    several_devices: bool
    several_nodes: bool
    precision: str
    accelerator: str

    def described_by(self) -> set[str]:
        """Return the columns that describe the configuration; bfloat16 is a 16-bit format too."""
        backend, precision = BACKENDS.get(self.backend), PRECISIONS.get(self.precision)
        described = {"1+ GPUs" if self.several_devices else "1 GPU"}
        if backend and backend.column:
            described.add(backend.column)
        if self.several_nodes:
            described.add("Nodes")
        if precision and precision.is_16_bit:
            described.add("16-bit")
        return described

    def command(self, gpus: set[int], nodes: set[int]) -> str:
        """Return what to type, given the numbers of ``gpus`` per node and of ``nodes`` among the cells."""
        return self._trainer_call() if self.subject == REFERENCE else self._in_words(gpus, nodes)

    def _trainer_call(self) -> str:
        arguments = ["gpus=k" if self.several_devices else "gpus=1"]
        if self.several_nodes:
            arguments.append("num_nodes=n")
        backend = BACKENDS.get(self.backend)
        if backend is None or (backend.dimensions and not backend.chosen_by_trainer):
            arguments.append(f"distributed_backend={self.backend!r}")
        if self.precision == "16":
            arguments.append("use_amp=True")
        elif self.precision != "32":
            shown = self.precision if self.precision.isdecimal() else repr(self.precision)
            arguments.append(f"precision={shown}")
        return f"Trainer({', '.join(arguments)})"

    def _in_words(self, gpus: set[int], nodes: set[int]) -> str:
        words = [_how_many(gpus, "k", "gpu")]
        if self.backend != "none":
            words.insert(0, self.backend)
        if self.several_nodes:
            words.append(_how_many(nodes, "n", "node"))
        return f"{self.subject}: {', '.join([*words, self.precision])}"


def _how_many(numbers: set[int], letter: str, noun: str) -> str:
    """Return ``4 gpus`` where all cells have 4, else ``k gpus``."""
    shown = str(*numbers) if len(numbers) == 1 else letter
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def mark(outcomes: Iterable[str], *, has_failed: bool = False) -> str:
    """Return the mark for cells that ended so; ``MARKS`` says what each means.

    Unsupported cells are left out of the judgement, unless there are no others.
    ``has_failed``: a check failed in a cell whose own outcome is a worse one, and nobody expected it.
    """
    judged = {outcome for outcome in outcomes if outcome != Outcome.UNSUPPORTED.value}
    if has_failed or Outcome.FAILED.value in judged:
        return "N"
    if not judged:
        return "-"
    if UNEXPECTED_PASS in judged:
        return "X"
    if not judged <= {Outcome.PASSED.value, Outcome.DEVIATES.value, KNOWN}:
        return "?"
    if KNOWN in judged:
        return "K"
    return "C" if Outcome.DEVIATES.value in judged else "Y"


def support_table(run: Run, *, every: bool = False) -> pd.DataFrame:
    """Return one row a configuration; columns are ``support_columns``, less the rare ones that no row needs.

    Configurations of which a subject declares no cell share one row, its last one, unless ``every`` is to have its own.

    The columns that describe the row's configuration hold its mark, the others are empty.
    ``Cells passed`` is ``passed/tried``, and says how many cells are known not to, and how many were not tried.
    ``Worst × noise`` is the largest error in multiples of rounding noise, NaN where nothing was measured.
    """
    groups = configurations(cell_table(run))
    rows = []
    for subject in dict.fromkeys(one.subject for one in groups):
        own = sorted((one for one in groups if one.subject == subject), key=reading_order)
        undeclared = [] if every else [one for one in own if is_undeclared(groups[one])]
        declared = [one for one in own if one not in undeclared]
        rows += [_row(run, one, groups[one]) for one in declared]
        for accelerator in dict.fromkeys(one.accelerator for one in undeclared):
            folded = [one for one in undeclared if one.accelerator == accelerator]
            rows.append(_folded(run, folded, declared, groups))
    needed = {column for one in groups for column in one.described_by()}
    columns = [name for name in support_columns() if name in needed or name not in rare_columns()]
    table: pd.DataFrame = pd.DataFrame(rows, columns=columns)
    return table


def configurations(cells: pd.DataFrame) -> dict[Configuration, pd.DataFrame]:
    """Return the cells of each configuration, in the order in which the plan has them."""
    several_nodes = cells["num_nodes"] > 1
    cells = cells.assign(several_nodes=several_nodes, several_devices=several_nodes | (cells["gpus"] > 1))
    return {
        Configuration(*cast("tuple[str, str, bool, bool, str, str]", key)): behind
        for key, behind in cells.groupby(list(Configuration.__dataclass_fields__), sort=False)
    }


def is_undeclared(cells: pd.DataFrame) -> bool:
    """Say whether a subject declares none of these cells."""
    return bool((cells["outcome"] == Outcome.UNSUPPORTED.value).all())


def _folded(
    run: Run,
    undeclared: Sequence[Configuration],
    declared: Sequence[Configuration],
    groups: Mapping[Configuration, pd.DataFrame],
) -> dict[str, str | int | float]:
    """Return the row of what a subject does not declare, marked where a column describes nothing that it does."""
    described = {name for one in undeclared for name in one.described_by()}
    described -= {name for one in declared for name in one.described_by()}
    cells = pd.concat([groups[one] for one in undeclared])
    kinds = undeclared_kinds(unsupported(run, cells))
    subject = undeclared[0].subject
    return {
        **{column: "-" if column in described else "" for column in mark_columns()},
        "Command": f"{subject}: not declared: {kinds}" if kinds else f"{subject}: not declared",
        "Cells passed": _share(Counter(cells["outcome"])),
        "Deviates": 0,
        "Worst × noise": float("nan"),
        "Devices": devices(run, undeclared[0].accelerator),
    }


def _row(run: Run, configuration: Configuration, cells: pd.DataFrame) -> dict[str, str | int | float]:
    outcomes = Counter(cells["outcome"])
    shown = mark(outcomes, has_failed=bool(cells["has_failed"].any()))
    described = configuration.described_by()
    return {
        **{column: shown if column in described else "" for column in mark_columns()},
        "Command": configuration.command(set(cells["gpus"]), set(cells["num_nodes"])),
        "Cells passed": _share(outcomes),
        "Deviates": outcomes[Outcome.DEVIATES.value],
        "Worst × noise": float(cells["error_x_noise"].max()),
        "Devices": devices(run, configuration.accelerator),
    }


def passed_of_tried(outcomes: Iterable[str]) -> tuple[int, int]:
    """Return how many cells passed, and how many were tried."""
    tried = [outcome for outcome in outcomes if outcome not in NOT_TRIED]
    return tried.count(Outcome.PASSED.value), len(tried)


def _share(outcomes: Counter[str]) -> str:
    passed, tried = passed_of_tried(outcomes.elements())
    share = f"{passed}/{tried}"
    besides = ", ".join(f"{outcomes[name]} {name}" for name in (KNOWN, *NOT_TRIED) if outcomes[name])
    return f"{share} ({besides})" if besides else share


def reading_order(configuration: Configuration) -> tuple[int, str, bool, bool, int, str, str]:
    """Return what sorts a subject's configurations: simple ones first, as in the old table; unknown names last."""
    backends, precision = list(BACKENDS), configuration.precision
    return (
        backends.index(configuration.backend) if configuration.backend in backends else len(backends),
        configuration.backend,
        configuration.several_devices,
        configuration.several_nodes,
        _PRECISION_ORDER.index(precision) if precision in _PRECISION_ORDER else len(_PRECISION_ORDER),
        precision,
        configuration.accelerator,
    )
