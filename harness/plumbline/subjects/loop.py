"""What the training loops of several adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def windows(loader: Any, accumulate: int) -> Iterator[tuple[int, Any, int, bool]]:
    """Yield each batch of an epoch with its place in a window of gradient accumulation.

    Yields:
        The number of the batch, the batch, the number of batches in its window, and whether it is the window's last.
        The last window of an epoch may be shorter than ``accumulate``.
    """
    for number, batch in enumerate(loader):
        first = number - number % accumulate
        size = min(accumulate, len(loader) - first)
        yield number, batch, size, number + 1 == first + size


def weighted(loss: Tensor, batch: Any) -> Tensor:
    """Return a batch's loss times its number of samples, and that number: the sums of a mean over samples."""
    count = len(batch["index"])
    return torch.stack(
        [loss.detach().double() * count, torch.tensor(float(count), dtype=torch.float64).to(loss.device)]
    )
