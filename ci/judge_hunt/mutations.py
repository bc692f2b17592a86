"""Random mistakes: an operation of a right trainer is dropped, doubled, delayed, rescaled, permuted or mis-cast.

A mutation is data: its place in the training loop, its operation, and the ranks, steps and tensors that it affects.
Each place has the families of causes that name it rightly. Nothing in ``harness/`` depends on this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from trainer_draws import OWN_REDUCTIONS, Draw

Tensors = dict[str, Tensor]
Families = frozenset[str]

SCALED = ("averaging", "accumulation", "loss-normalisation")
"""Families for a gradient times a number: the number alone does not show where it was multiplied."""


def _named(operations: str, *families: str) -> dict[str, Families]:
    """Return the operations, each with its right families."""
    return dict.fromkeys(operations.split(), frozenset(families))


_DATA = {
    **_named("delayed permuted-rows permuted-ranks", "data"),
    **_named("dropped doubled rescaled"),  # numbers that belong to no sample: not a known mistake
    **_named("cast", "amp"),
}

PLACES: Mapping[str, Mapping[str, Families]] = {
    "samples": _named("dropped doubled delayed", "data"),
    "inputs": _DATA,
    "targets": _DATA,
    "loss": {
        **_named("doubled rescaled", *SCALED),
        **_named("dropped", "optimizer", "sync"),  # on one rank: the average of the others
        **_named("cast", "amp", *SCALED),  # in the backward, only the loss's divisor is rounded
    },
    "gradients before the reduction": {
        **_named("doubled rescaled", *SCALED),
        **_named("dropped", "sync", "optimizer", "unused-params", "averaging"),
        **_named("delayed permuted-ranks", "sync"),
        **_named("permuted-tensors", "sync", "optimizer"),
        **_named("cast", "amp"),
    },
    "reduction": {**_named("dropped", "sync"), **_named("doubled", "averaging")},
    "gradients after the reduction": {
        **_named("doubled rescaled", *SCALED),
        **_named("dropped", "optimizer", "unused-params"),
        **_named("delayed permuted-ranks", "sync"),
        **_named("permuted-tensors", "sync", "optimizer"),
        **_named("cast", "amp"),
    },
    "clipping": _named("dropped rescaled", "clipping"),
    "optimizer state": {
        **_named("dropped doubled rescaled delayed permuted-tensors", "optimizer"),
        **_named("permuted-ranks", "optimizer", "sync"),
        **_named("cast", "amp", "optimizer"),
    },
    "update": {
        **_named("dropped rescaled delayed permuted-tensors", "optimizer", "sync"),
        **_named("doubled", "optimizer", "averaging", "sync"),
        **_named("cast", "amp", "optimizer"),
    },
    "weights": {
        **_named("dropped rescaled delayed permuted-tensors", "optimizer", "sync"),
        **_named("cast", "amp", "optimizer"),
    },
    "buffers": _named("dropped doubled rescaled delayed permuted-tensors cast", "buffers"),
    "weights at the start": {
        **_named("dropped doubled rescaled permuted-tensors", "sync", "launch"),
        **_named("cast", "amp", "sync"),
    },
    "zeroing": _named("dropped", "accumulation"),
    "schedule": _named("dropped doubled", "optimizer"),
    "evaluation": _named("dropped", "metrics", "data"),
    "evaluation mode": _named("dropped", "metrics", "buffers"),
}
"""Operations at each place, with their right families; none if the mistake has no name."""

FACTORS = (-1.0, 0.25, 0.5, 0.9, 0.97, 1.03, 1.1, 1.5, 3.0)


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Args:
        place: a key of ``PLACES``.
        operation: a key of ``PLACES[place]``.
        rank: the affected rank; None: all ranks.
        step: the first affected step; ``lasting``: all later steps too.
        parameter: the index of the affected tensor; None: all tensors.
        factor: the factor of a rescaling.
        dtype: the dtype of a cast.
    """

    place: str
    operation: str
    rank: int | None = None
    step: int = 0
    lasting: bool = True
    parameter: int | None = None
    factor: float = 0.5
    dtype: str = "bfloat16"

    @property
    def families(self) -> Families:
        """The right families of causes."""
        named = PLACES[self.place][self.operation]
        # The sign of a gradient counts as the optimizer's.
        return named | {"optimizer"} if named and self.operation == "rescaled" and self.factor < 0 else named

    def happens(self, place: str, step: int) -> bool:
        """Return whether the mutation affects this place at this step, on some rank."""
        return place == self.place and (step >= self.step if self.lasting else step == self.step)


@st.composite
def mutations(draw: st.DrawFn, drawn: Draw) -> Mutation:
    """Draw a mutation at a place that the trainer has."""
    place = draw(st.sampled_from(list(_places(drawn))))
    ranks = drawn.cell.topology.devices
    operations = [name for name in PLACES[place] if ranks > 1 or name != "permuted-ranks"]
    operation = draw(st.sampled_from(operations))
    # Delayed values need a step before, and gradients that are not zeroed need a step after.
    first, last = int(operation == "delayed"), drawn.recipe.steps - 1 - (place == "zeroing")
    if place == "weights at the start":
        last = 0
    # If every rank evaluates all samples, a rank that does not makes no difference.
    alone = place != "evaluation" or drawn.trainer.evaluation == "shares"
    return Mutation(
        place,
        operation,
        rank=draw(st.sampled_from([None, None, *range(ranks)])) if ranks > 1 and alone else None,
        step=draw(st.integers(first, max(first, last))),
        lasting=draw(st.booleans()),
        parameter=draw(st.sampled_from([None, None, *range(8)])),
        factor=draw(st.sampled_from(FACTORS)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
    )


def _places(drawn: Draw) -> list[str]:
    """Return the places of a trainer and its problem."""
    recipe = drawn.recipe
    own = drawn.trainer.reduction in OWN_REDUCTIONS and drawn.trainer.reduction != "in-the-backward"
    has = {
        "gradients before the reduction": own or drawn.trainer.reduction == "none",
        "reduction": own,
        "clipping": recipe.clip_norm is not None,
        "optimizer state": recipe.optimizer != "sgd",
        "buffers": "batchnorm" in recipe.layers,
        "schedule": recipe.schedule != "none",
        "evaluation": recipe.validate_every is not None,
        "evaluation mode": recipe.validate_every is not None and "batchnorm" in recipe.layers,
    }
    return [place for place in PLACES if has.get(place, True)]


class Mutator:
    """Carries out a mutation on one rank; without one, changes nothing."""

    def __init__(self, mutation: Mutation | None, rank: int) -> None:
        self.mutation = mutation
        self.rank = rank
        self._before: dict[str, Tensors] = {}

    def times(self, place: str, step: int, *, on_any_rank: bool = False) -> int:
        """Return how often an operation runs: once, unless a mutation affects it."""
        mutation = self.mutation
        if mutation is None or not mutation.happens(place, step):
            return 1
        if mutation.rank not in (None, self.rank) and not on_any_rank:
            return 1
        return {"dropped": 0, "doubled": 2}.get(mutation.operation, 1)

    def factor(self, place: str, step: int) -> float:
        """Return the factor of a rescaling: 1, unless a mutation affects this place."""
        mutation = self.mutation
        happens = mutation is not None and mutation.happens(place, step) and mutation.rank in (None, self.rank)
        return mutation.factor if mutation is not None and happens and mutation.operation == "rescaled" else 1.0

    def values(self, place: str, step: int, tensors: Tensors) -> Tensors:
        """Return the tensors at a place, changed by the mutation; all ranks must call it at the same steps."""
        mutation = self.mutation
        if mutation is None or mutation.place != place:
            return tensors
        tensors = {name: value.to_dense() if value.is_sparse else value for name, value in tensors.items()}
        before = self._before.get(place, tensors)
        if mutation.operation == "delayed":
            self._before[place] = {name: value.detach().clone() for name, value in tensors.items()}
        if not mutation.happens(place, step) or not tensors:
            return tensors
        names = list(tensors)
        chosen = names if mutation.parameter is None else [names[mutation.parameter % len(names)]]
        changed = VALUES[mutation.operation](mutation, tensors, chosen, before)
        return changed if mutation.rank in (None, self.rank) else tensors


Change = Callable[[Mutation, Tensors, list[str], Tensors], Tensors]
"""Returns the tensors with the chosen ones changed; the last argument has the previous step's."""


def _each(change: Callable[[Mutation, Tensor], Tensor]) -> Change:
    return lambda mutation, tensors, chosen, before: {
        name: change(mutation, value) if name in chosen else value for name, value in tensors.items()
    }


def _delayed(mutation: Mutation, tensors: Tensors, chosen: list[str], before: Tensors) -> Tensors:
    same = {name for name in chosen if name in before and before[name].shape == tensors[name].shape}
    return {name: before[name] if name in same else value for name, value in tensors.items()}


def _permuted_tensors(mutation: Mutation, tensors: Tensors, chosen: list[str], before: Tensors) -> Tensors:
    """Replace each chosen tensor with the next of its shape, or reverse its rows if it is the only one."""
    changed = dict(tensors)
    for name in chosen:
        alike = [other for other, value in tensors.items() if value.shape == tensors[name].shape]
        following = alike[(alike.index(name) + 1) % len(alike)]
        value = tensors[following]
        changed[name] = value.flip(0) if following == name and value.dim() else value
    return changed


def _permuted_ranks(mutation: Mutation, tensors: Tensors, chosen: list[str], before: Tensors) -> Tensors:
    """Replace each rank's tensors with the next rank's."""
    changed = dict(tensors)
    for name in chosen:
        parts = [torch.empty_like(tensors[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensors[name].contiguous())
        changed[name] = parts[(dist.get_rank() + 1) % len(parts)]
    return changed


def _rescaled(mutation: Mutation, value: Tensor) -> Tensor:
    return value * mutation.factor if value.is_floating_point() else value


def _cast(mutation: Mutation, value: Tensor) -> Tensor:
    return value.to(getattr(torch, mutation.dtype)).to(value.dtype) if value.is_floating_point() else value


VALUES: dict[str, Change] = {
    "dropped": _each(lambda mutation, value: value * 0),
    "doubled": _each(lambda mutation, value: value * 2 if value.is_floating_point() else value),
    "rescaled": _each(_rescaled),
    "cast": _each(_cast),
    "permuted-rows": _each(lambda mutation, value: value.roll(1, 0)),
    "delayed": _delayed,
    "permuted-tensors": _permuted_tensors,
    "permuted-ranks": _permuted_ranks,
}
"""The operations on tensors. Integers cannot be rescaled or cast."""
