"""The registry of subjects that ship: an adapter's short name, its module, and the library that it tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShippedAdapter:
    """An adapter: ``module`` declares its subjects.

    ``library`` is what pip is asked for to install the library under test, None where that comes with Plumbline. With
    ``dependencies`` it is installed without all that it asks for, and these are what of it training needs.
    """

    module: str
    library: str | None = None
    dependencies: tuple[str, ...] = ()


SHORT_NAMES: dict[str, ShippedAdapter] = {
    "reference": ShippedAdapter("harness.subjects.reference"),
    "train-loop": ShippedAdapter("harness.subjects.train_loop"),
    "torch": ShippedAdapter("harness.subjects.torch_trainers", "torch"),
    "lightning": ShippedAdapter("harness.subjects.lightning_trainer", "lightning"),
    "fabric": ShippedAdapter("harness.subjects.fabric_trainer", "lightning"),
    "accelerate": ShippedAdapter("harness.subjects.accelerate_trainer", "accelerate"),
    "transformers": ShippedAdapter("harness.subjects.transformers_trainer", "transformers[torch]"),
    "ignite": ShippedAdapter("harness.subjects.ignite_trainer", "pytorch-ignite"),
    # Some ninety packages that draw, upload and report are what it asks for.
    "aitoolbox": ShippedAdapter("harness.subjects.aitoolbox_trainer", "aitoolbox", dependencies=("tqdm",)),
}
