"""The subjects that ship: short name, module, and the library under test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShippedAdapter:
    """An adapter that ships, declared by ``module``.

    ``library`` is pip's requirement for the library under test, None if it comes with Plumbline. ``dependencies`` is
    what training needs of the library's dependencies; if given, the others are not installed. ``torch`` is the version
    of torch that it needs, None for any.
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
    "trl-padding-free": ShippedAdapter("plumbline.subjects.trl_trainer", "trl"),
    "sentence-transformers": ShippedAdapter("plumbline.subjects.sentence_transformers_trainer", SENTENCES),
    "sentence-transformers-gather": ShippedAdapter("plumbline.subjects.sentence_transformers_trainer", SENTENCES),
    "composer": ShippedAdapter("plumbline.subjects.composer_trainer", "mosaicml", torch="torch==2.7.0"),
    "ray": ShippedAdapter("plumbline.subjects.ray_trainer", "ray[train]"),
    "deepspeed": ShippedAdapter("plumbline.subjects.deepspeed_trainer", "deepspeed"),
    # It depends on some ninety packages for plots, uploads and reports.
    "aitoolbox": ShippedAdapter("plumbline.subjects.aitoolbox_trainer", "aitoolbox", dependencies=("tqdm",)),
}
