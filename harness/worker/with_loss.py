"""The job's model as Hugging Face's models are called: columns by name, and the loss in what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

IGNORED = -100
"""The label that ``torch.nn.CrossEntropyLoss`` and transformers leave out of a loss."""


class WithLoss(NamedTuple):
    """What the forward returns. A named tuple, because wrappers look into tuples for tensors."""

    loss: Tensor
    logits: Any


class ModelWithLoss(nn.Module):
    """``model`` with ``loss`` inside of its forward: ``forward(**batch)`` returns ``.loss`` and ``.logits``.

    Where there are labels, transformers' Trainer passes ``num_items_in_batch``, the number of labels in all that one
    optimizer step sees, and then divides by nothing else: as with its own models, the loss is divided by that number.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, return_loss: bool = True, num_items_in_batch: Any = None, **batch: Tensor) -> WithLoss:
        """Return the loss of ``batch`` and the model's outputs; ``return_loss`` is only there to be found."""
        outputs = self.model(batch)
        loss = self.loss(outputs, batch)
        if num_items_in_batch is not None:  # so far it is a mean over this batch's labels
            loss = loss * (batch["labels"] != IGNORED).sum() / num_items_in_batch
        return WithLoss(loss, outputs)
