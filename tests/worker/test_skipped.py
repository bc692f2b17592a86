"""A step that a trainer's own loss scaler skips is recorded as due, with its samples and its scale."""

from __future__ import annotations

import torch
from torch import nn

from plumbline.worker.recorder.recorder import Recorder


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        return self.layer(batch["x"])


def test_what_is_said_to_be_skipped_is_a_step_without_gradients():
    recorder, model = Recorder(), Model()
    recorder.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(recorder.optimizer_steps.before)
    optimizer.register_step_post_hook(recorder.optimizer_steps.after)
    for index in range(3):
        batch = {"x": torch.randn(6, 4), "index": torch.arange(6) + 6 * index}
        loss = model(batch).square().mean()
        recorder.on_loss(batch)
        loss.backward()
        if index == 1:
            recorder.skipped(optimizer, 1024.0)
        else:
            optimizer.step()
        optimizer.zero_grad()
    taken, skipped, following = recorder.steps
    assert (taken.skipped, skipped.skipped, following.skipped) == (False, True, False)
    assert (taken.scale, skipped.scale, following.scale) == (None, 1024.0, None)
    assert skipped.before is taken.after
    assert skipped.after is taken.after
    assert not skipped.gradients
    assert [step.micro_batches[0].samples for step in recorder.steps] == [
        tuple(range(6)), tuple(range(6, 12)), tuple(range(12, 18)),
    ]  # fmt: skip
    assert skipped.learning_rates == (0.1,)
