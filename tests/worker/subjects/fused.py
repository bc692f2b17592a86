"""A right trainer whose optimizer unscales gradients and skips steps inside its kernel."""

from __future__ import annotations

import torch

from plumbline import subject


@subject(name="fused", backends=["none"], precisions=["32", "16"])
def train(job):
    model = job.model().to(job.device)
    plain = job.optimizer(model.parameters())
    groups = [{key: value for key, value in group.items() if key != "fused"} for group in plain.param_groups]
    optimizer = type(plain)(groups, fused=True)
    scaler = job.grad_scaler()
    generator = torch.Generator()
    for epoch in range(job.epochs):
        generator.manual_seed(job.seed + epoch)
        for batch in torch.utils.data.DataLoader(job.dataset, job.batch_size, shuffle=job.shuffle, generator=generator):
            batch = {name: column.to(job.device) for name, column in batch.items()}
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
