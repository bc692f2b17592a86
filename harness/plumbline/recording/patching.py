"""Wraps functions permanently, or until the patches are removed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

Around = Callable[..., Any]
"""Called with the original function and its arguments; returns the result."""


def attempt(note: Callable[..., T], *args: Any) -> T | None:
    """Call ``note`` inside of a function of the script. If it raises, return None, so that the script continues."""
    try:
        return note(*args)
    except Exception:
        return None


class Patches:
    """Collects replacements and registrations between ``open`` and ``close``, which undoes them.

    If several are open, the one that was opened last collects.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._functions: list[tuple[Any, Any]] = []

    def open(self) -> None:
        _OPEN.append(self)

    def close(self) -> None:
        """Stop collecting, and undo what is still in place, last first. Another call does nothing."""
        if self in _OPEN:
            _OPEN.remove(self)
        while self._undo:
            self._undo.pop()()
        _exchange_imported({id(new): (new, _at_work(old)) for old, new in self._functions})
        self._functions.clear()

    def add(self, undo: Callable[[], None], *replaced: Any) -> None:
        """Call ``undo`` in ``close``. ``replaced``: a function, and its replacement."""
        self._undo.append(undo)
        if replaced and isinstance(replaced[0], FunctionType):
            self._functions.append((replaced[0], replaced[1]))

    def replace_imported(self, modules: Iterable[ModuleType] | None = None) -> None:
        """Replace the functions also in modules that have imported them by name: in ``modules``, or in all."""
        _exchange_imported({id(old): (old, new) for old, new in self._functions}, modules)


_OPEN: list[Patches] = []
_ABSENT = object()


def modules_with_functions_of_torch() -> list[ModuleType]:
    """Return the modules that have imported functions of torch by name.

    A forked process that looks for them itself copies the memory of all that modules hold: reading counts references.
    """
    return [
        module
        for module in _other_modules()
        if any(
            type(value) is FunctionType and (value.__module__ or "").startswith("torch.")
            for value in list(vars(module).values())
        )
    ]


def _other_modules() -> list[ModuleType]:
    """Return all modules but those of torch and ours.

    Modules of torch keep the original of a function if everything is patched before a script runs, too.
    """
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [module for module in modules if module.__name__.partition(".")[0] not in ("torch", "plumbline")]


def _exchange_imported(functions: Mapping[int, tuple[Any, Any]], modules: Iterable[ModuleType] | None = None) -> None:
    """Replace functions in modules; ``functions`` has the old and the new one by the id of the old one."""
    for module in _other_modules() if modules is None else modules:
        if functions.keys().isdisjoint(map(id, list(vars(module).values()))):
            continue
        for name, value in list(vars(module).items()):
            known = functions.get(id(value))
            if known is not None and known[0] is value:
                setattr(module, name, known[1])


def replace(owner: Any, name: str, new: Any) -> None:
    """Set ``owner.name`` of a module or class, permanently or until open patches are closed."""
    old, seen = vars(owner).get(name, _ABSENT), getattr(owner, name, None)
    setattr(owner, name, new)

    def put_back() -> None:
        if vars(owner).get(name, _ABSENT) is not new:
            return  # other code has replaced it since
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, _at_work(old))

    for patches in _OPEN[-1:]:
        patches.add(put_back, seen, new)


def _at_work(function: Any) -> Any:
    """Return a function or, if it is a detached wrapper, the function that it wraps."""
    while hasattr(function, "plumbline_original"):
        function = function.plumbline_original
    return function


def undone_by(undo: Callable[[], None]) -> None:
    """Call ``undo`` when open patches are closed, or never if none are open."""
    for patches in _OPEN[-1:]:
        patches.add(undo)


def wrap(owner: Any, name: str, around: Around) -> None:
    """Replace ``owner.name`` by a function that calls ``around`` with the original and the arguments.

    Do nothing if there is no such name: versions of torch differ.
    """
    original = getattr(owner, name, None)
    if original is None:
        return
    own = vars(owner).get(name, original)  # a method of a C++ class binds only as it is there

    if not _OPEN:

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        replace(owner, name, wrapper)
        return
    arounds = [around]

    @functools.wraps(original)
    def detachable(*args: Any, **kwargs: Any) -> Any:
        # Other code may have stored or wrapped this function, so it may outlive its patches.
        return arounds[0](original, *args, **kwargs) if arounds else original(*args, **kwargs)

    def detach() -> None:
        arounds.clear()
        detachable.plumbline_original = own  # type: ignore[attr-defined]

    replace(owner, name, detachable)
    undone_by(detach)


def wrap_overrides(base: Any, name: str, around: Around) -> None:
    """Wrap a method of a class, and of all present and future subclasses that override it.

    If an override calls the method of its base class, ``around`` sees both calls, and has to know which is the
    outermost.
    """
    for one in classes_of(base):
        if name in vars(one):
            wrap(one, name, around)
    announced = base.__init_subclass__.__func__ if "__init_subclass__" in vars(base) else None

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs) if announced is None else announced(cls, **kwargs)
        if name in vars(cls):
            wrap(cls, name, around)

    replace(base, "__init_subclass__", classmethod(init_subclass))


def classes_of(base: Any) -> Iterator[Any]:
    """Yield a class and all its present subclasses; one with several bases perhaps more than once."""
    yield base
    for one in base.__subclasses__():
        yield from classes_of(one)
