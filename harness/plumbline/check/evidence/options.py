"""What the ranks of a checked command are told: one JSON file in the folder to which they write."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "options.json"
INTERRUPTED = "interrupted-"
"""What the file of a rank is named, before its number, that is about to end because it was asked to."""
DEAL = "deal.json"

Deal = dict[int, tuple[int, list[list[int]]]]
"""For each rank, which of its iterators over loaders to give other samples, and those of its first batches."""

WINDOW = "window-"
"""What the folder of a later window is named, before the number of its step."""

TOKEN_MEAN, SAMPLE_MEAN, SUM = OBJECTIVES = ("token-mean", "sample-mean", "sum")
"""What a training may be declared to optimise, over all ranks and micro-batches of a step."""


@dataclass(frozen=True)
class RecordingOptions:
    """What to record: ``steps`` steps of each optimizer, ``after`` so many; ``stop``: then end the process.

    ``every``: record one more step whenever an optimizer has taken a multiple of so many steps; 0 records none.
    ``truth``: the precision of the replays that count as exact, ``float64`` or ``float32``.
    ``sample_parameters``: the share of each optimizer's parameters that is judged where it is below 1, else their
    number; 0 is all of them.
    ``objective``: which of ``OBJECTIVES`` the training is declared to optimise, "" without a declaration.
    ``splits``: note which samples the batches of loaders have; ``without_dropout``: dropout drops nothing.
    ``state``: note what a checkpoint has to bring back. ``replays``: compute gradients and updates again.
    ``interrupt_after``: end the process when an optimizer is about to take a step after so many; 0 never does.
    ``dry_run``: nothing is replayed; what recording would cost is measured instead.
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


def write_options(folder: Path, options: RecordingOptions) -> None:
    (folder / FILE).write_text(json.dumps(asdict(options)), encoding="utf-8")


def read_options(folder: str) -> RecordingOptions:
    """Return the options in ``folder``; without them, raise ``OSError`` or ``ValueError``."""
    return RecordingOptions(**json.loads((Path(folder) / FILE).read_text(encoding="utf-8")))


def write_deal(folder: Path, deal: Deal) -> None:
    (folder / DEAL).write_text(json.dumps(list(deal.items())), encoding="utf-8")


def read_deal(folder: str) -> Deal:
    """Return the samples that loaders are to give to each rank; nothing where the script's own order is kept."""
    file = Path(folder) / DEAL
    return (
        {rank: (number, batches) for rank, (number, batches) in json.loads(file.read_text())} if file.exists() else {}
    )
