"""Observers learn when an optimizer is created, and when it gets more parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from plumbline.recording.parameters import follow_added_parameters, parameters_of


def test_an_optimizer_is_told_of_with_its_parameters_each_time_that_it_is_given_some(monkeypatch):
    monkeypatch.setattr(Optimizer, "add_param_group", Optimizer.add_param_group)
    told = []
    follow_added_parameters(lambda optimizer: told.append((optimizer, len(parameters_of(optimizer)))))
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([model.weight], 0.1)
    optimizer.add_param_group({"params": model.bias})
    assert told == [(optimizer, 1), (optimizer, 2)]
