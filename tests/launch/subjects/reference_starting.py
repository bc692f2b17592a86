"""The reference trainer where it has to start its ranks itself, forked or spawned."""

from __future__ import annotations

from functools import partial

from plumbline import Trainer, subject
from plumbline.subjects import reference

BACKENDS = ["none", "auto", "dp", "ddp", "ddp2"]
PRECISIONS = ["64", "32", "16", "bf16"]


@subject(name="forking", backends=BACKENDS, precisions=PRECISIONS, capabilities=reference.CAPABILITIES, launch="node")
def forking(job):
    reference.train(job)


@subject(name="spawning", backends=BACKENDS, precisions=PRECISIONS, capabilities=reference.CAPABILITIES, launch="node")
def spawning(job):
    reference.Trainer = partial(Trainer, start_method="spawn")
    reference.train(job)
