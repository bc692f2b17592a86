"""Sentence Transformers' trainer under test with a loss that gathers the pairs of all ranks: that of one device."""

from __future__ import annotations

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

with installed_by("pip install 'sentence-transformers[train]'"):
    from plumbline.subjects.sentence_transformers_trainer import PRECISIONS, embed


@subject(
    name="sentence-transformers-gather",
    backends=["none", "ddp"],
    precisions=PRECISIONS,
    library="sentence-transformers",
    buffers="per-rank",
)
def train(job):
    embed(job, gather=True)
