"""A trainer that needs shared memory, because workers load its batches."""

from __future__ import annotations

from torch.utils.data import DataLoader

from plumbline import subject


@subject(name="loads-with-workers", backends=["none"])
def train(job):
    """Train correctly, with two loader workers."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(job.epochs):
        for batch in DataLoader(job.dataset, batch_size=job.batch_size, shuffle=True, num_workers=2):
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            optimizer.step()
