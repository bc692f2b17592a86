"""Lightning's accumulation, for versions that got it wrong.

Every version divides the short last window of an epoch by the length of a full one. Here the module makes up for that,
so that what is left to be wrong is the mistake of the version.
"""

from __future__ import annotations

from harness import subject
from harness.subjects.lightning_trainer import Adapter, fit

CAPABILITIES = ["accumulation", "validation"]


class _Weighed(Adapter):
    """A module whose loss counts by the length of its window."""

    def on_train_batch_start(self, batch, batch_idx):
        batches, window = self.trainer.num_training_batches, self.trainer.accumulate_grad_batches
        self.weight = window / min(window, batches - batch_idx // window * window)

    def training_step(self, batch, batch_idx):
        return self.weight * super().training_step(batch, batch_idx)


class _WithoutIndex(_Weighed):
    """The same with the shorter signature, which Lightning's documentation allows."""

    def training_step(self, batch):
        return super().training_step(batch, None)


@subject(name="lightning-windows", backends=["none", "ddp"], capabilities=CAPABILITIES)
def train(job):
    """Train ``job`` with ``training_step(self, batch, batch_idx)``."""
    fit(job, _Weighed(job))


@subject(name="lightning-windows-without-index", backends=["none", "ddp"], capabilities=CAPABILITIES)
def train_without_index(job):
    """Train ``job`` with ``training_step(self, batch)``."""
    fit(job, _WithoutIndex(job))
