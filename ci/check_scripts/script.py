"""A script of the corpus: where it comes from, how it is started, what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REWRITTEN = "rewritten"
PICTURES = ("torchvision",)


@dataclass(frozen=True)
class Script:
    """One training script.

    Attributes:
        name: what it is called in the tables.
        command: the command line, as a user types it in the folder ``folder``.
        covers: what of a training it shows.
        source: a repository ``owner/name`` on GitHub, or ``rewritten`` for a file of ``scripts/``.
        folder: the folder of the repository that the command runs in.
        also: the files and folders of the repository that it needs.
        needs: modules it imports beside what the project's own tests need; some have a stand-in in ``stand_ins``.
        data: what ``data.py`` writes into the folder first.
        environment: variables that are set for it.
        changes: a file, a pattern and what replaces it, where the original asks for devices that are not here, for an
            older library, or has its size in its text. A script with changes does not count as unmodified.
        is_adapted: a stand-in changes what it runs on: it does not count as unmodified.
        ranks: how many ranks train.
        steps: how many optimizer steps it does.
        accepted: what check may say: ``right``, ``right in part``, ``not judged``, ``wrong``.
        because: why the script is wrong, proven by hand, or why it cannot be judged, or not all of it.
        is_wrong: the training is wrong, whatever can be judged of it.
        calls_backward: False where losses are differentiated otherwise, so that they cannot be compared.
        races: processes write to the same weights without waiting, so that no two runs have the same losses.
    """

    name: str
    command: str
    covers: str
    source: str = REWRITTEN
    folder: str = "."
    also: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    changes: tuple[tuple[str, str, str], ...] = ()
    is_adapted: bool = False
    ranks: int = 1
    steps: int = 4
    accepted: tuple[str, ...] = ("right",)
    because: str = ""
    is_wrong: bool = False
    calls_backward: bool = True
    races: bool = False

    @property
    def is_unmodified(self) -> bool:
        """Whether it is somebody else's script, as it was published."""
        return self.source != REWRITTEN and not self.changes and not self.is_adapted
