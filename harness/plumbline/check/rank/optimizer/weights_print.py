"""Fingerprints weights to detect whether they have changed, even if the script writes to ``data``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plumbline.evidence.projection import fingerprints
from plumbline.recording.sharding import is_data_parallel_shard, local

_UNREADABLE = RuntimeError, NotImplementedError, TypeError


def weights_prints(parameters: Sequence[Tensor]) -> list[int]:
    """Return the fingerprints of this rank's parts of parameters; 0 if the bits of one are not accessible."""
    try:
        return fingerprints(list(map(_bits, parameters)))
    except _UNREADABLE:
        return list(map(_print, parameters))


def _print(parameter: Tensor) -> int:
    try:
        return fingerprints([_bits(parameter)])[0]
    except _UNREADABLE:
        return 0


def _bits(parameter: Tensor) -> Tensor:
    own = local(parameter.detach())
    own = torch.view_as_real(own) if own.is_complex() else own
    return own.view(torch.uint8) if own.element_size() == 1 else own


def written(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the version and the fingerprint of each parameter. If either changes, the parameter was written to.

    The version does not count writes through ``data``. The memory of a shard that is gathered in place holds sometimes
    a part and sometimes all of the parameter, so its fingerprint is 0.
    """
    readable = [one for one in parameters if not is_data_parallel_shard(one)]
    prints = dict(zip(map(id, readable), weights_prints(readable), strict=True))
    return [(int(one._version), prints.get(id(one), 0)) for one in parameters]
