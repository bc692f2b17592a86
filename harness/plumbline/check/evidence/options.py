"""Options for the ranks of a checked command: one JSON file in the folder to which the ranks write."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "options.json"
INTERRUPTED = "interrupted-"
"""Prefix of the file that a rank writes before it ends on request. The rank's number follows."""
DEAL = "deal.json"

Deal = dict[int, tuple[int, list[list[int]]]]
"""For each rank: the number of the data loader iterator that gets other samples, and the samples of its first
batches."""

GROUP = "group-"
"""Prefix of an empty file in the folder of each rank. The name of the rank's process group follows."""

WINDOW = "window-"
"""Prefix of the folder of a later window. The number of its first step follows."""

TOKEN_MEAN, SAMPLE_MEAN, SUM = OBJECTIVES = ("token-mean", "sample-mean", "sum")
"""Objectives that a training can be declared to optimise, over all ranks and micro-batches of a step."""


@dataclass(frozen=True)
class RecordingOptions:
    """What to record: ``steps`` steps of each optimizer after its first ``after``. ``stop``: then end the process.

    ``every``: record one more step whenever an optimizer has taken a multiple of this many steps; 0 records none.
    ``truth``: the precision of the replays that count as exact, ``float64`` or ``float32``.
    ``sample_parameters``: how many of each optimizer's parameters to judge: a share if it is below 1, else a number; 0
    judges all of them.
    ``objective``: which of ``OBJECTIVES`` the training is declared to optimise, "" without a declaration.
    ``splits``: note which samples are in the batches of data loaders. ``without_dropout``: dropout drops nothing.
    ``state``: note what a checkpoint has to restore. ``replays``: recompute gradients and updates.
    ``interrupt_after``: end the process when an optimizer is about to take a step after this many; 0 never does.
    ``dry_run``: replay nothing, and measure what recording would cost instead.
    """

    steps: int = 4
    after: int = 0
    stop: bool = False
    dry_run: bool = False
    truth: str = "float64"
    sample_parameters: float = 0.0
    every: int = 0
    objective: str = ""
    splits: bool = False
    without_dropout: bool = False
    state: bool = False
    replays: bool = True
    interrupt_after: int = 0


def refuse_invalid_options(*, steps: Any, after: Any, objective: Any) -> None:
    """Refuse options of the Python interface that mean nothing.

    Raises:
        TypeError, ValueError: the message names the option and what it must be.
    """
    refuse_other_than_number("steps", steps, 1)
    refuse_other_than_number("after", after, 0)
    if objective not in ("", *OBJECTIVES):
        raise ValueError(f"objective={objective!r}: unknown objective; choose one of {', '.join(OBJECTIVES)}")


def refuse_other_than_number(name: str, value: Any, least: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless the value is a whole number that is not below ``least``."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least:
        kind = ValueError if is_whole else TypeError
        raise kind(f"{name}={value!r} must be a whole number, {least} or more")


def refuse_other_than_function(caller: str, train: Any) -> None:
    """Raise ``TypeError`` unless ``caller`` was given a function."""
    if not callable(train):
        raise TypeError(f"{caller} takes a training function, not {type(train).__name__}: write {caller[:-1]}train)")


def write_options(folder: Path, options: RecordingOptions) -> None:
    (folder / FILE).write_text(json.dumps(asdict(options)), encoding="utf-8")


def read_options(folder: str) -> RecordingOptions:
    """Return the options in ``folder``; raise ``OSError`` or ``ValueError`` if there are none."""
    return RecordingOptions(**json.loads((Path(folder) / FILE).read_text(encoding="utf-8")))


def write_deal(folder: Path, deal: Deal) -> None:
    (folder / DEAL).write_text(json.dumps(list(deal.items())), encoding="utf-8")


def read_deal(folder: str) -> Deal:
    """Return the samples that each rank's data loader has to yield; empty if the script's own order is kept."""
    file = Path(folder) / DEAL
    return (
        {rank: (number, batches) for rank, (number, batches) in json.loads(file.read_text())} if file.exists() else {}
    )
