"""The precisions a cell may be trained in."""

from __future__ import annotations

from dataclasses import dataclass

from plumbline.core.named_registry import NamedRegistry


@dataclass(frozen=True)
class Precision:
    """One way to compute.

    ``storage`` is the dtype of weights and gradients; ``autocast`` the dtype of the matrix work where the
    forward runs under ``torch.autocast``; ``scaled`` says that a GradScaler scales the loss.
    Dtypes are torch's names, so that this file needs no torch.
    """

    name: str
    storage: str
    autocast: str | None = None
    scaled: bool = False

    @property
    def is_16_bit(self) -> bool:
        return (self.autocast or self.storage) in ("float16", "bfloat16")


PRECISIONS: NamedRegistry[Precision] = NamedRegistry(
    "precision",
    (
        Precision("64", storage="float64"),
        Precision("32", storage="float32"),
        Precision("16", storage="float32", autocast="float16", scaled=True),
        Precision("bf16", storage="float32", autocast="bfloat16"),
    ),
)
