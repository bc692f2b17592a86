"""A precision, and a trainer that supports it: one file, given to ``--subject``, and to pytest's ``-p``."""

from __future__ import annotations

from torch.utils.data import DataLoader

from plumbline import subject
from plumbline.core.precision import PRECISIONS, Precision

PRECISIONS.register(Precision("16-unscaled", storage="float32", autocast="float16"))


@subject(name="mixes", backends=["none"], precisions=["16-unscaled"])
def train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(job.epochs):
        for batch in DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle):
            optimizer.zero_grad()
            with job.autocast():
                loss = job.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
