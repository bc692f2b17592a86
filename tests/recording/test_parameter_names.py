"""Names of parameters: by modules, by attributes, or by the order of the model's own parameters."""

from __future__ import annotations

import torch
from torch import nn

from plumbline.recording.parameters import ParameterNames


def test_the_first_module_that_holds_a_parameter_names_it():
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    second.bias = first.bias
    names = ParameterNames(first, second)
    assert names.of(torch.optim.SGD([*first.parameters(), second.weight])) == ["weight", "bias", "Linear.weight"]


def test_names_are_told_apart_and_what_nobody_holds_is_called_by_its_place():
    class Net(nn.Linear):
        pass

    models = [nn.Linear(1, 1), Net(1, 1), Net(1, 1)]
    names = ParameterNames(*models)
    unknown = nn.Parameter(torch.ones(4, 5))
    optimizer = torch.optim.SGD([one.weight for one in models] + [unknown])
    assert names.of(optimizer) == ["weight", "Net.weight", "Net 2.weight", "SGD parameter 3"]
    assert [names.of_one(one) for one in (models[1].bias, unknown)] == ["Net.bias", "a parameter of shape (4, 5)"]


def test_master_weights_have_the_names_of_the_parameters_whose_copies_they_are():
    model = nn.Linear(2, 3)
    names = ParameterNames(model)
    masters = [one.detach().clone() for one in model.parameters()]
    assert names.known(masters) == ["weight", "bias"]
    assert names.known(masters[::-1]) == [None, None]
    assert names.known([model.bias, masters[0]]) == ["bias", None]
