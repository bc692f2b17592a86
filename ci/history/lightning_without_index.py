"""Lightning with the shorter signature of ``training_step``, which its documentation allows."""

from __future__ import annotations

from plumbline import subject
from plumbline.subjects.lightning_trainer import Adapter, fit


class _WithoutIndex(Adapter):
    def training_step(self, batch):
        return super().training_step(batch, None)


@subject(name="lightning-without-index", backends=["none", "ddp"], capabilities=["accumulation", "validation"])
def train(job):
    """Train ``job`` with ``training_step(self, batch)``."""
    fit(job, _WithoutIndex(job))
