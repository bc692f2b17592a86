"""The registry of subjects that ship: an adapter's short name, its module, and the library that it tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShippedAdapter:
    """An adapter: ``module`` declares its subjects.

    ``library`` is what pip is asked for to install the library under test, None where that comes with Plumbline. With
    ``dependencies`` it is installed without all that it asks for, and these are what of it training needs.
    ``torch`` is the torch that it needs, None where that is any.
    """

    module: str
    library: str | None = None
    dependencies: tuple[str, ...] = ()
    torch: str | None = None


SENTENCES = "sentence-transformers[train]"

SHORT_NAMES: dict[str, ShippedAdapter] = {
    "reference": ShippedAdapter("plumbline.subjects.reference"),
    "train-loop": ShippedAdapter("plumbline.subjects.train_loop"),
    "torch": ShippedAdapter("plumbline.subjects.torch_trainers", "torch"),
    "torch-schedules": ShippedAdapter("plumbline.subjects.torch_schedules", "torch"),
    "lightning": ShippedAdapter("plumbline.subjects.lightning_trainer", "lightning"),
    "fabric": ShippedAdapter("plumbline.subjects.fabric_trainer", "lightning"),
    "accelerate": ShippedAdapter("plumbline.subjects.accelerate_trainer", "accelerate"),
    "transformers": ShippedAdapter("plumbline.subjects.transformers_trainer", "transformers[torch]"),
    "ignite": ShippedAdapter("plumbline.subjects.ignite_trainer", "pytorch-ignite"),
    "trl": ShippedAdapter("plumbline.subjects.trl_trainer", "trl"),
    "trl-padding-free": ShippedAdapter("plumbline.subjects.trl_padding_free", "trl"),
    "sentence-transformers": ShippedAdapter("plumbline.subjects.sentence_transformers_trainer", SENTENCES),
    "sentence-transformers-gather": ShippedAdapter("plumbline.subjects.sentence_transformers_gather", SENTENCES),
    "composer": ShippedAdapter("plumbline.subjects.composer_trainer", "mosaicml", torch="torch==2.7.0"),
    "ray": ShippedAdapter("plumbline.subjects.ray_trainer", "ray[train]"),
    "deepspeed": ShippedAdapter("plumbline.subjects.deepspeed_trainers", "deepspeed"),
    # Some ninety packages that draw, upload and report are what it asks for.
    "aitoolbox": ShippedAdapter("plumbline.subjects.aitoolbox_trainer", "aitoolbox", dependencies=("tqdm",)),
}
