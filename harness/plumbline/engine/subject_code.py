"""The hash of a subject's source, and the commit of its repository."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from plumbline.machine.software import repository_commit
from plumbline.planning.declaration import Declaration
from plumbline.results.header_footer import SubjectCode

_PACKAGE = Path(__file__).resolve().parents[1]


def subject_code(declarations: Iterable[Declaration]) -> dict[str, SubjectCode]:
    """Return the code of each subject by name. If several declarations have the same name, the first counts."""
    found: dict[str, SubjectCode] = {}
    for one in declarations:
        if one.name not in found:
            found[one.name] = SubjectCode(sha256=one.sha256, commit=_commit(one))
    return found


def _commit(one: Declaration) -> str | None:
    file = Path(one.source[0]).resolve() if one.source else None
    return None if file is None or file.is_relative_to(_PACKAGE) else repository_commit(file)
