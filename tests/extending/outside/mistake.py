"""A trainer with a mistake that nobody has thought of: the first gradient is one row too far down."""

from __future__ import annotations

from torch.utils.data import DataLoader

from harness import subject


@subject(name="rolls", backends=["none"], precisions=["32"])
def train(job):
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(job.epochs):
        for batch in DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle):
            optimizer.zero_grad()
            job.loss(model(batch), batch).backward()
            first = next(model.parameters())
            first.grad = first.grad.roll(1, 0)
            optimizer.step()
