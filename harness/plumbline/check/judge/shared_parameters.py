"""Which parameters the ranks' optimizers have in common, so that each is compared with itself on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plumbline.check.evidence.training import RecordedStep


def shared_numbers(steps: Mapping[int, RecordedStep]) -> Mapping[int, Sequence[int]]:
    """Return, for each rank, the numbers of the parameters that every rank's optimizer has, in one order.

    A parameter is known by its name in a module and its shape; one that no module holds, only where all ranks have the
    same list.
    """
    keys = {tuple((one.name, one.shape) for one in step.parameters) for step in steps.values()}
    if len(keys) == 1:
        return dict.fromkeys(steps, range(len(next(iter(keys)))))
    places = {
        rank: {(one.name, one.shape): number for number, one in enumerate(step.parameters) if one.named}
        for rank, step in steps.items()
    }
    first, *others = places.values()
    common = [key for key in first if all(key in other for other in others)]
    return {rank: [own[key] for key in common] for rank, own in places.items()}


def shared_part(steps: Mapping[int, RecordedStep]) -> Mapping[int, RecordedStep]:
    """Return the same step of several ranks as it concerns the parameters that every rank's optimizer has."""
    numbers = shared_numbers(steps)
    return {
        rank: step if len(numbers[rank]) == len(step.parameters) else step.only(numbers[rank])
        for rank, step in steps.items()
    }
