"""The callback for the ``Trainer`` of Lightning."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from plumbline.check.callbacks.checked import ToldVerdict


class LightningCallback(ToldVerdict, Callback):  # type: ignore[misc]
    """``Trainer(…, callbacks=[plumbline.LightningCallback()])`` judges the first steps; see ``ToldVerdict``."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._look()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()
