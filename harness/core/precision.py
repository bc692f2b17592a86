"""The precisions a cell may be trained in."""

from __future__ import annotations

from dataclasses import dataclass


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


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("64", storage="float64"),
        Precision("32", storage="float32"),
        Precision("16", storage="float32", autocast="float16", scaled=True),
        Precision("bf16", storage="float32", autocast="bfloat16"),
    )
}
