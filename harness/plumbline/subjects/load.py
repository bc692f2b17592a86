"""Lists the subjects that ship, parses ``--subject``, and loads the subjects behind it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from plumbline.core.errors import PlanError, SubjectError
from plumbline.subjects.declare import Subject
from plumbline.user_code import import_file, import_module


@dataclass(frozen=True)
class ShippedAdapter:
    """An adapter that ships, declared by ``module``.

    ``library`` is pip's requirement for the library under test, None if it comes with Plumbline. If ``dependencies``
    are given, only these dependencies of the library are installed. ``torch`` is the required version of torch, None
    for any.
    """

    module: str
    library: str | None = None
    dependencies: tuple[str, ...] = ()
    torch: str | None = None


SENTENCES = "sentence-transformers[train]"

SHORT_NAMES: dict[str, ShippedAdapter] = {
    "reference": ShippedAdapter("plumbline.subjects.reference"),
    "train-loop": ShippedAdapter("plumbline.subjects.train_loop"),
    "torch": ShippedAdapter("plumbline.subjects.torch_trainers", "torch"),
    "torch-schedules": ShippedAdapter("plumbline.subjects.torch_schedules", "torch"),
    "lightning": ShippedAdapter("plumbline.subjects.lightning_trainer", "lightning"),
    "fabric": ShippedAdapter("plumbline.subjects.fabric_trainer", "lightning"),
    "accelerate": ShippedAdapter("plumbline.subjects.accelerate_trainer", "accelerate"),
    "transformers": ShippedAdapter("plumbline.subjects.transformers_trainer", "transformers[torch]"),
    "ignite": ShippedAdapter("plumbline.subjects.ignite_trainer", "pytorch-ignite"),
    "trl": ShippedAdapter("plumbline.subjects.trl_trainer", "trl"),
    "trl-padding-free": ShippedAdapter("plumbline.subjects.trl_trainer", "trl"),
    "sentence-transformers": ShippedAdapter("plumbline.subjects.sentence_transformers_trainer", SENTENCES),
    "sentence-transformers-gather": ShippedAdapter("plumbline.subjects.sentence_transformers_trainer", SENTENCES),
    "peft": ShippedAdapter("plumbline.subjects.peft_trainer", "peft"),
    "torchtitan": ShippedAdapter("plumbline.subjects.torchtitan_trainer", "torchtitan"),
    "composer": ShippedAdapter("plumbline.subjects.composer_trainer", "mosaicml", torch="torch==2.7.0"),
    "ray": ShippedAdapter("plumbline.subjects.ray_trainer", "ray[train]"),
    "deepspeed": ShippedAdapter("plumbline.subjects.deepspeed_trainer", "deepspeed"),
    # aitoolbox depends on some ninety packages for plots, uploads and reports.
    "aitoolbox": ShippedAdapter("plumbline.subjects.aitoolbox_trainer", "aitoolbox", dependencies=("tqdm",)),
}


def parse_subject(text: str) -> tuple[str, str | None]:
    """Split ``locator;python=/path/to/python`` into the locator and the interpreter, None for this one."""
    locator, _, settings = text.partition(";")
    python = None
    for setting in filter(None, settings.split(";")):
        name, _, value = setting.partition("=")
        if name.strip() != "python" or not value:
            raise PlanError(f"--subject {text!r}: only python=/path/to/python may follow the semicolon")
        python = value.strip()
        if shutil.which(python) is None:
            raise PlanError(f"--subject {text!r}: interpreter {python} not found")
    if not locator:
        raise PlanError(f"--subject {text!r} names no subject")
    return locator, python


def load(locator: str) -> list[Subject]:
    """Return the subjects behind ``path/to/file.py``, ``path/to/file.py::name``, a module or a short name.

    Several subjects can have the same name, each for different backends.
    """
    place, _, wanted = locator.partition("::")
    if place.endswith(".py"):
        module = import_file(Path(place))
    else:
        shipped = {adapter.module for adapter in SHORT_NAMES.values()}
        module = import_module(SHORT_NAMES[place].module if place in SHORT_NAMES else place, shipped, SHORT_NAMES)
    every = [
        value for value in vars(module).values() if isinstance(getattr(value, "__plumbline_subject__", None), Subject)
    ]
    # Imported trainers do not count, unless the file contains nothing but imports.
    own = [value for value in every if value.__module__ == module.__name__] or every
    found = list({id(value): value.__plumbline_subject__ for value in own}.values())
    if not found:
        script = f"; to check a script, write plumbline check -- python {place}" if place.endswith(".py") else ""
        raise SubjectError(f"declares no subject: decorate its train(job) with plumbline's @subject(...){script}")
    if place in SHORT_NAMES and any(declared.name == place for declared in found):
        wanted = wanted or place  # its module can declare other subjects too
    chosen = [declared for declared in found if wanted in ("", declared.name)]
    if not chosen:
        names = dict.fromkeys(declared.name for declared in found)
        raise SubjectError(f"has no subject {wanted!r}; it has {', '.join(names)}")
    return chosen


@dataclass(frozen=True)
class Shipped:
    """A subject that ships.

    ``library`` is its library with the installed version, None if it is not installed. ``declared`` has a declaration
    for each group of backends. ``obstacle`` is the reason why the subject cannot be imported.
    """

    name: str
    library: str | None
    declared: tuple[Subject, ...] = ()
    obstacle: str | None = None


def shipped() -> list[Shipped]:
    every = []
    for name, adapter in SHORT_NAMES.items():
        distribution = (adapter.library or "torch-plumbline").partition("[")[0]
        try:
            library = f"{distribution} {metadata.version(distribution)}"
        except metadata.PackageNotFoundError:
            every.append(Shipped(name, None))
            continue
        try:
            every.append(Shipped(name, library, tuple(load(name))))
        except (Exception, SystemExit) as error:
            reason = str(error) if isinstance(error, SubjectError) else f"{type(error).__name__}: {error}"
            every.append(Shipped(name, library, obstacle=reason.removeprefix("cannot be imported: ")))
    return every
