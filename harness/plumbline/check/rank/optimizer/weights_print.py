"""Fingerprints weights to detect whether they have changed, even if the script writes to ``data``."""

from __future__ import annotations

import torch
from torch import Tensor

from plumbline.evidence.projection import fingerprint
from plumbline.recording.sharding import is_data_parallel_shard, local


def weights_print(parameter: Tensor) -> int:
    """Return the fingerprint of this rank's part of a parameter; 0 if the bits of the tensor are not accessible."""
    try:
        own = local(parameter.detach())
        own = torch.view_as_real(own) if own.is_complex() else own
        return fingerprint(own.view(torch.uint8) if own.element_size() == 1 else own)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0


def written(parameter: Tensor) -> tuple[int, int]:
    """Return the version and the fingerprint of a parameter. If either changes, the parameter was written to.

    The version does not count writes through ``data``. The memory of a shard that is gathered in place holds sometimes
    a part and sometimes all of the parameter, so its fingerprint is 0.
    """
    return int(parameter._version), 0 if is_data_parallel_shard(parameter) else weights_print(parameter)
