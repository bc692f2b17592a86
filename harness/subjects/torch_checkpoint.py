"""Checkpoints with torch.distributed.checkpoint: each rank writes what it holds, and reads what it holds on its mesh.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from __future__ import annotations

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

# The optimizers' state by the names of parameters, of which ranks may have different ones.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save_parts(model, optimizers, folder, others):
    """Write this rank's parts of model and optimizers, and ``others``: states that all ranks have alike."""
    states, state = get_state_dict(model, optimizers, options=BY_NAME)
    dcp.save({"model": states, "optimizers": state, **others}, checkpoint_id=folder)


def load_parts(model, optimizers, folder, others):
    """Read this rank's parts of model and optimizers; return ``others`` as they were written."""
    states, state = get_state_dict(model, optimizers, options=BY_NAME)
    saved = {"model": states, "optimizers": state, **others}
    dcp.load(saved, checkpoint_id=folder)  # into the tensors that are there
    set_state_dict(
        model, optimizers, model_state_dict=saved["model"], optim_state_dict=saved["optimizers"], options=BY_NAME
    )
    return {name: saved[name] for name in others}
