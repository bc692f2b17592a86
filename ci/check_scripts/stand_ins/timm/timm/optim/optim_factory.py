"""Groups of parameters."""


def add_weight_decay(model, weight_decay):
    """Return a group of vectors without decay and a group of the other parameters, without frozen ones."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": weight_decay},
    ]
