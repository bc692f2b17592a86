"""Checkpoints with torch.distributed.checkpoint: each rank writes and reads what it holds.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from __future__ import annotations

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

# The optimizers' state by the names of parameters, because ranks may hold different ones.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
SOME = StateDictOptions(strict=False)


def save_parts(model, optimizers, folder, others, held=None):
    """Write this rank's parts of model and optimizers, and ``others``, which are the same on all ranks.

    ``held`` names the parameters and buffers that this rank trains. None: all of the model's.
    """
    dcp.save({**parts(model, optimizers, held), **others}, checkpoint_id=folder)


def load_parts(model, optimizers, folder, others, held=None):
    """Read this rank's parts of model and optimizers, and return the saved ``others``."""
    saved = {**parts(model, optimizers, held), **others}
    dcp.load(saved, checkpoint_id=folder)  # in place
    set_model_state_dict(model, saved["model"], options=SOME)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, saved["optimizers"], options=BY_NAME)
    return {name: saved[name] for name in others}


def parts(model, optimizers, held):
    states = get_model_state_dict(model)
    if held is not None:
        states = {name: value for name, value in states.items() if name in held}
    return {
        "model": states,
        "optimizers": get_optimizer_state_dict(model, optimizers, options=BY_NAME) if optimizers else {},
    }
