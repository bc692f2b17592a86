"""Finds parameters that only some ranks train, although all ranks train one model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from plumbline.check.evidence.training import RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.noted import headline_note
from plumbline.check.judge.rank_weights import (
    LAYOUT,
    WEIGHTS,
    common_steps,
    forward_communicates,
    rank_layout,
    shared_part,
)
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import listed

CHECK = "update"


def judge_uneven_ranks(training: RecordedTraining) -> Iterator[Finding]:
    """Yield parameters that only some ranks train, and those of a partly frozen model that only some ranks use."""
    if training.world_size == 1 or forward_communicates(training) or not _is_one_model(training):
        return
    found = _trained_on_some(training)
    if found is not None:
        yield found
    elif names := _used_on_some(training):
        yield headline_note(
            CHECK,
            f"In the recorded steps, gradients of {listed(names)} come from the same ranks each time, and never from "
            "the others. Check that the same adapters and layers are active on all ranks.",
        )


def _is_one_model(training: RecordedTraining) -> bool:
    """Return whether wrappers make ranks data parallel only, so that each module is one model on all ranks."""
    if not rank_layout(training).is_data_parallel:
        return False
    modules = [module for rank in training.ranks for module in (rank.facts.get(LAYOUT) or {}).get("modules", ())]
    return bool(modules) and all(module["wrapper"] or module["sharded_as_data"] for module in modules)


def _trained_on_some(training: RecordedTraining) -> Finding | None:
    common = [steps for _, steps in common_steps(training)]
    if not common or any(rank.error for rank in training.ranks):
        return None
    tables = [_at_first_forward(rank) for rank in training.ranks]
    trained = [
        _trained(steps[rank.rank] for steps in common) | {name for name, is_trained in own.items() if is_trained}
        for rank, own in zip(training.ranks, tables, strict=True)
    ]
    for name in sorted({name for own in tables for name in own}):
        lacking = [index for index, own in enumerate(trained) if name not in own]
        if not 0 < len(lacking) < len(trained):
            continue
        every = [
            each
            for each in sorted(set().union(*trained))
            if [p for p, own in enumerate(trained) if each not in own] == lacking
        ]
        one = len(every) == 1
        if name in tables[lacking[0]]:
            what = "it is frozen on" if one else "they are frozen on"
        else:
            what = "it does not exist on" if one else "they do not exist on"
        having = [index for index in range(len(trained)) if index not in lacking]
        finding = failed_with_hint(
            CHECK,
            f"{counted(len(every), 'parameter')} of one model {'is' if one else 'are'} trained on {_ranks(having)} "
            f"only: {listed(every)}; {what} {_ranks(lacking)}",
            "freeze and add parameters in the same way on every rank, before the model is wrapped or sharded",
            cause="trained-on-some-ranks",
            family="sync",
        )
        return replace(finding, rank=lacking[0], parameter=name)
    return None


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {listed(numbers)}"


def _at_first_forward(rank: RecordedRank) -> dict[str, bool]:
    modules = (rank.facts.get(WEIGHTS) or {}).get("modules", ())
    return {one["name"]: one["trained"] for module in modules for one in module["parameters"] if not one["ignored"]}


def _trained(steps: Iterable[RecordedStep]) -> set[str]:
    """Return trainable parameters, with or without an optimizer on this rank: ranks may share parameters out."""
    found: set[str] = set()
    for step in steps:
        found |= {one.name for one in step.parameters if one.named and one.trained}
        found |= (step.facts.get("unoptimized") or {}).keys()
    return found


def _used_on_some(training: RecordedTraining) -> list[str]:
    """Return parameters whose gradients come from the same ranks at each of several steps, and not from the others."""
    modules = (training.ranks[0].facts.get(WEIGHTS) or {}).get("modules", ())
    if all(parameter["trained"] for module in modules for parameter in module["parameters"]):
        return []
    users: dict[str, list[frozenset[int]]] = {}
    world = set(range(training.world_size))
    for _, steps in common_steps(training):
        if len({(step.optimizer, step.number) for step in steps.values()}) > 1:
            return []
        for name, ranks in _users(shared_part(steps)).items():
            users.setdefault(name, []).append(ranks)
    return [
        name
        for name, every in users.items()
        if (seen := [ranks for ranks in every if ranks]) and len(seen) > 1 and len(set(seen)) == 1 and seen[0] != world
    ]


def _users(steps: Mapping[int, RecordedStep]) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for rank, step in steps.items():
        every = [step.parts(one.local) for one in (*step.other_passes, *step.passes)]
        for number, parameter in enumerate(step.parameters):
            if parameter.sampled and parameter.named and parameter.held_in is None:
                own = found.setdefault(parameter.name, set())
                if any(bool(parts[number].any()) for parts in every):
                    own.add(rank)
    return {name: frozenset(ranks) for name, ranks in found.items()}
