"""The callback for the ``Trainer`` of Hugging Face Transformers, and trainers that inherit from it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from plumbline.check.callbacks.checked import ToldVerdict


class TransformersCallback(ToldVerdict, TrainerCallback):  # type: ignore[misc]
    """``Trainer(…, callbacks=[plumbline.TransformersCallback()])`` judges the first steps; see ``ToldVerdict``."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
