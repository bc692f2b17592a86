"""TRL's SFTTrainer under test with ``padding_free=True``: a batch is one row, and positions divide it."""

from __future__ import annotations

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

with installed_by("pip install trl"):
    from plumbline.subjects.trl_trainer import CAPABILITIES, PRECISIONS, supervised


@subject(
    name="trl-padding-free",
    backends=["none", "ddp"],
    precisions=PRECISIONS,
    capabilities=CAPABILITIES,
    library="trl",
    loss="labels",
)
def train(job):
    supervised(job, padding_free=True)
