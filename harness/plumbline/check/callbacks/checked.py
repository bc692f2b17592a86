"""Checks a training function on every call, whatever launches it: Ray Train, Accelerate or a spawn."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from plumbline.check.attach import Attachment, attach
from plumbline.check.evidence.options import refuse_invalid_options, refuse_other_than_function
from plumbline.check.training_verdict import TrainingVerdict
from plumbline.check.verdict.verdict import Answer

LONGEST_WAIT_S = 60.0
"""Seconds that rank 0 waits for the other ranks. They go on training, and communication libraries abort ranks that wait
longer."""


class WrongTrainingError(Exception):
    """A checked training is wrong; the message is the verdict."""


class ToldVerdict:
    """Records ``steps`` steps after the first ``after``. Rank 0 judges them, and prints the verdict to standard error.

    ``stop_when_wrong``: if the training is wrong, rank 0 then raises ``WrongTrainingError``, so that its launcher ends
    all ranks. ``objective`` and ``folder`` are arguments of ``plumbline.attach``. ``verdict`` is None until it is
    known, and stays None on other ranks.
    """

    def __init__(
        self,
        steps: int = 4,
        *,
        after: int = 0,
        stop_when_wrong: bool = False,
        objective: str = "",
        folder: str | None = None,
    ) -> None:
        refuse_invalid_options(steps=steps, after=after, objective=objective)
        self._options: dict[str, Any] = {"steps": steps, "after": after, "objective": objective, "folder": folder}
        self._stop_when_wrong = stop_when_wrong
        self._attached: Attachment | None = None
        self.verdict: TrainingVerdict | None = None

    def __enter__(self) -> ToldVerdict:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end(has_failed=error is not None)

    def _begin(self) -> None:
        if self._attached is not None:  # an earlier training raised an error
            self._attached.close()
        self._attached = attach(**self._options)

    def _look(self) -> None:
        if self._attached is not None and self._attached.is_complete:
            self._end()

    def _end(self, *, has_failed: bool = False) -> None:
        attached, self._attached = self._attached, None
        if attached is None:
            return
        attached.close()
        if attached.rank == 0:
            self._tell(attached)
            stops = self._stop_when_wrong and not has_failed
            if stops and self.verdict is not None and self.verdict.answer is Answer.WRONG:
                raise WrongTrainingError(str(self.verdict))

    def _tell(self, attached: Attachment) -> None:
        try:
            self.verdict = attached.verdict(wait=LONGEST_WAIT_S)
        except Exception as error:  # an error of the check must not end the training
            print(f"plumbline: the training could not be judged: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            print(self.verdict, file=sys.stderr, flush=True)


P = ParamSpec("P")
R = TypeVar("R")


class Checked(Generic[P, R]):
    """A function whose calls are checked. On rank 0, ``verdict`` is the verdict on the last call in this process."""

    def __init__(self, train: Callable[P, R], options: dict[str, Any]) -> None:
        refuse_other_than_function("checked()", train)
        functools.update_wrapper(self, train)
        self._train, self._options = train, options
        self._told = ToldVerdict(**options)

    @property
    def verdict(self) -> Any:
        return self._told.verdict

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._told = ToldVerdict(**self._options)
        with self._told:
            return self._train(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle by name if this object has replaced its function, as a decorator does, so that it can be spawned."""
        module, name = self._train.__module__, self._train.__qualname__
        if _named(module, name) is self:
            return _named, (module, name)
        return Checked, (self._train, self._options)


@overload
def checked(train: Callable[P, R], /) -> Checked[P, R]: ...


@overload
def checked(**options: Any) -> Callable[[Callable[P, R]], Checked[P, R]]: ...


def checked(train: Any = None, /, **options: Any) -> Any:
    """Return a training function that records its first steps. At its end, rank 0 judges them and prints the verdict.

    Use it as a decorator, with or without options, or call it where the function is passed on::

        TorchTrainer(plumbline.checked(train), …).fit()
        accelerate.notebook_launcher(plumbline.checked(steps=8)(train), num_processes=2)

    ``options`` are the arguments of ``ToldVerdict``: ``steps``, ``after``, ``objective``, ``folder`` and
    ``stop_when_wrong``. With ``stop_when_wrong``, a call whose training is wrong raises ``WrongTrainingError`` on rank
    0.
    """
    if train is not None:
        return Checked(train, options)
    ToldVerdict(**options)  # refuses invalid options now, not when the training starts
    return functools.partial(Checked, options=options)


def _named(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):  # defined inside a function
        return None
