"""A script of the corpus: its source, its command and its requirements."""

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
        name: its name in the tables.
        command: the command line, as a user types it in ``folder``.
        covers: which features of training it has.
        source: a repository ``owner/name`` on GitHub, or ``rewritten`` for a file of ``scripts/``.
        folder: the folder in the repository where the command runs.
        also: other files and folders of the repository that it needs.
        needs: modules that the project's own tests do not need; some have a stand-in in ``stand_ins``.
        data: the kind of data that ``data.py`` writes first.
        environment: variables that are set for it.
        changes: files, patterns and replacements, if the original needs devices or an older library, or hard-codes its
            size. A script with changes does not count as unmodified.
        is_adapted: a stand-in changes what it runs on, so it does not count as unmodified.
        ranks: the number of ranks.
        steps: the number of optimizer steps.
        accepted: the accepted verdicts: ``right``, ``right in part``, ``not judged``, ``wrong``.
        because: why the script is wrong, as proven by hand, or why it cannot be judged completely.
        is_wrong: the training is wrong, even if that cannot be judged.
        calls_backward: False if losses are differentiated in another way, so that they cannot be compared.
        races: processes write to the same weights without synchronisation, so that losses differ between runs.
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
        """Whether it is somebody else's script, as published."""
        return self.source != REWRITTEN and not self.changes and not self.is_adapted
