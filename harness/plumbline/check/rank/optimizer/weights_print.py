"""A fingerprint of weights, which tells whether they have changed, also where the script writes to ``data``."""

from __future__ import annotations

import torch
from torch import Tensor

from plumbline.evidence.projection import fingerprint
from plumbline.recording.sharding import is_data_parallel_shard, local


def weights_print(parameter: Tensor) -> int:
    """Return the fingerprint of what this rank holds of a parameter; 0 of tensors that do not show their bits."""
    try:
        own = local(parameter.detach())
        own = torch.view_as_real(own) if own.is_complex() else own
        return fingerprint(own.view(torch.uint8) if own.element_size() == 1 else own)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0


def written(parameter: Tensor) -> tuple[int, int]:
    """Return what another value of tells that a parameter was written to: its version, and its fingerprint.

    The version does not count what is written through ``data``. The memory of a shard that is gathered in place holds
    now a part and now all of it, so its fingerprint is 0.
    """
    return int(parameter._version), 0 if is_data_parallel_shard(parameter) else weights_print(parameter)
