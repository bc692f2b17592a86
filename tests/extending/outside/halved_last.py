"""A trainer with another mistake: the last micro-batch of a window counts half."""

from __future__ import annotations

from torch.utils.data import DataLoader

from plumbline import subject


@subject(name="halves-the-last", backends=["none"], precisions=["32"], capabilities=["accumulation"])
def train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(job.epochs):
        batches = list(DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle))
        for first in range(0, len(batches), job.accumulate):
            window = batches[first : first + job.accumulate]
            optimizer.zero_grad()
            for number, batch in enumerate(window, 1):
                factor = 0.5 if number == len(window) else 1.0
                (factor * job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
