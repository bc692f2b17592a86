"""A trainer with an unusual mistake: each row of the first gradient is in reverse order."""

from __future__ import annotations

from torch.utils.data import DataLoader

from plumbline import subject


@subject(name="mirrors", backends=["none"], precisions=["32"])
def train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(job.epochs):
        for batch in DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle):
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            first = next(model.parameters())
            first.grad = first.grad.flip(-1)
            optimizer.step()
