"""What a rank keeps of a tensor that several ranks hold together, each a part of it.

The tensor inside is torch's. It is only carried here, so this file needs torch for its annotations alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """A block of a tensor of ``shape``, whose first entry has the place ``begin`` in it.

    ``values`` lie on the cpu, and may have no entries. ``ranks`` are those whose blocks make up the tensor, this rank's
    among them; with several copies of it they are one copy's. Where what a rank holds is no block (its part of a sum
    over ranks, say) there are none.
    """

    values: Tensor
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
