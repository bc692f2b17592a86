"""Notifies observers of events, and isolates the errors of observers that are not essential."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from plumbline.recording.observer import Facts, Observer


class Observers:
    """Several observers, which are notified of each event in order.

    An exception in an ``essential`` observer is raised after all have been notified. Any other observer that raises is
    notified of nothing more except ``stop``, and its final facts give the reason as ``error``.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._errors: dict[str, str] = {}

    def tell(self, event: Callable[[Observer], Facts | None]) -> Facts:
        """Call a method on each observer that has not raised; return their facts by the observers' names."""
        return self._tell([one for one in self._observers if one.name not in self._errors], event)

    def stop(self) -> None:
        """End recording, also for observers that have raised, so that they release what they hold."""
        self._tell(self._observers, lambda one: one.stop())

    def final_facts(self, names: Collection[str] | None = None) -> Facts:
        """Return the facts about the whole process, of all observers or of those with these ``names``."""
        observers = [one for one in self._observers if names is None or one.name in names]
        facts = self._tell([one for one in observers if one.name not in self._errors], lambda one: one.final_facts())
        errors = {one.name: self._errors[one.name] for one in observers if one.name in self._errors}
        return facts | {name: {**facts.get(name, {}), "error": error} for name, error in errors.items()}

    def _tell(self, observers: Sequence[Observer], event: Callable[[Observer], Facts | None]) -> Facts:
        noted: Facts = {}
        raised: Exception | None = None
        for one in observers:
            try:
                facts = event(one)
            except Exception as error:
                if one.essential:
                    raised = raised or error
                else:
                    self._errors.setdefault(one.name, f"{type(error).__name__}: {error}")
            else:
                if facts is not None:
                    noted[one.name] = facts
        if raised is not None:
            raise raised
        return noted
