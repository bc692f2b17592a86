"""The precisions of training."""

from __future__ import annotations

from dataclasses import dataclass

from plumbline.core.named_registry import NamedRegistry


@dataclass(frozen=True)
class Precision:
    """A precision, by its name on the command line. Dtypes are given by their names in torch.

    ``storage`` is the dtype of the model's weights and of their gradients. The optimizer steps these weights, or
    ``masters``: copies of this dtype, from which the model's weights are rounded after each step. ``scaled``: a
    GradScaler scales the loss. ``opt_in``: its cells are planned only for a subject that declares it, or if the user
    names it. ``sampled``: unless the user names it, only its cells of a few workloads and topologies are planned.
    """

    name: str
    storage: str
    autocast: str | None = None
    scaled: bool = False
    opt_in: bool = False
    masters: str | None = None
    sampled: bool = False

    @property
    def is_16_bit(self) -> bool:
        return (self.autocast or self.storage) in ("float16", "bfloat16")

    @property
    def stepped(self) -> str:
        """The dtype of the weights that the optimizer steps, and of its state."""
        return self.masters or self.storage


PRECISIONS: NamedRegistry[Precision] = NamedRegistry(
    "precision",
    (
        Precision("64", storage="float64"),
        Precision("32", storage="float32"),
        Precision("16", storage="float32", autocast="float16", scaled=True),
        Precision("bf16", storage="float32", autocast="bfloat16"),
        Precision("bf16-true", storage="bfloat16", opt_in=True),
        Precision("bf16-master", storage="bfloat16", masters="float32", opt_in=True, sampled=True),
    ),
)
