"""The repaired scripts, and those with a mistake, as subjects in one module, for a single fork server."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from changes import MISTAKES, REPAIRS, SCRIPTS
from changes import changed as with_changes
from changes import source as with_mistake

HERE = Path(__file__).parent
LIBRARIES = {"accelerate-example": "accelerate", "fabric-example": "lightning"}


def module(name: str, text: str) -> ModuleType:
    """Return ``text`` as a module whose lines appear in tracebacks."""
    made, file = ModuleType(name), f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), made.__dict__)
    return made


def put_up(subject: str, name: str, text: str) -> None:
    """Declare the script ``text`` of ``subject`` as a subject called ``name``."""
    adapter = importlib.import_module(subject.replace("-", "_"))
    script = module(name, text)

    def train(job):
        adapter.train(job, script)

    train.__plumbline_subject__ = replace(adapter.train.__plumbline_subject__, name=name, train=train)
    globals()[name] = train


def text_of(subject: str) -> str:
    """Return a subject's published script."""
    return (HERE / f"{SCRIPTS[subject]}.py").read_text()


for subject in SCRIPTS:
    library = LIBRARIES.get(subject)
    if library is not None and importlib.util.find_spec(library) is None:
        continue
    put_up(subject, f"{subject}-repaired", with_changes(text_of(subject), REPAIRS.get(subject, ())))
    for mistake in MISTAKES:
        if mistake.subject == subject:
            put_up(subject, mistake.id, with_mistake(text_of(subject), mistake))
