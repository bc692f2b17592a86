"""Checks that ranks of one model begin with the same weights, keep them the same, and train the same parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from plumbline.check.evidence.training import Facts, RecordedRank, RecordedStep, RecordedTraining, ScriptStep
from plumbline.check.judge.joint_truth import JointTruth
from plumbline.check.judge.noted import (
    IF_INTENDED,
    HeadlineNote,
    failed_observers,
    headline_note,
    information,
    not_judged,
)
from plumbline.check.judge.rank_weights import (
    LAYOUT,
    UNKNOWN,
    WEIGHTS,
    RankLayout,
    RankWeights,
    drift_apart,
    factor_of_equal_weights,
    forward_communicates,
    of_all,
    rank_layout,
    reduced_parameters,
    shared_part,
    weights_are_made_equal,
    weights_at,
    weights_of,
)
from plumbline.check.judge.unreduced import AVERAGED
from plumbline.check.rank.low_rank import factor_pairs
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.evidence.training_record import StepOfRanks
from plumbline.judge.causes.weights import FirstDifference, PartedRanksCase, UnequalStartCase, differing_parameters
from plumbline.judge.checks.skipped_steps import skipped_on_some_ranks
from plumbline.judge.findings import Information, failed, failed_with_hint, passed
from plumbline.judge.hypothesis import Match, explain
from plumbline.report.text import in_two_digits, listed

AT_THE_START, AFTER_STEPS = "initial-weights", "ranks-agree"


def judge_initial_weights(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding about the weights before each optimizer's first recorded step, and about frozen ones."""
    yield from failed_observers(training, "weights", AT_THE_START)
    layout = rank_layout(training)
    if training.world_size == 1:
        return
    reduced = reduced_parameters(training)
    parts = {case.name for case in JointTruth(training).cases if case.one_gradient}  # wrongly reduced: no replicas
    compared, every, seen = 0, 0, set()
    for steps in training.common_steps:
        if steps.optimizer in seen:
            continue
        seen.add(steps.optimizer)
        weights = list(weights_at(steps))
        compared += len(weights)
        every += len(steps.first.parameters)
        differing = [one for one in weights if one.differ("before")]
        accused = [one for one in differing if must_agree(one, layout, reduced) and not one.is_rounding]
        accused = [one for one in accused if one.parameter.name not in parts]
        if accused and steps.number and weights_are_made_equal(training):
            what = differing_parameters([one.parameter.name for one in accused], len(weights))
            yield not_judged(AT_THE_START, f"{what} between ranks at the first recorded step, as in local SGD")
            return
        if accused:
            yield _unequal_start(accused, len(weights), steps.number)
            return
        if differing:
            what = differing_parameters([one.parameter.name for one in differing], len(weights))
            why = "" if layout.is_data_parallel else f"; {IF_INTENDED}{layout.reason}"
            yield information(AT_THE_START, f"{what} between ranks at the first recorded step{why}")
            return
    frozen = _frozen(training, {name for _, name in reduced}) if layout.is_data_parallel else None
    if frozen is None and layout.is_data_parallel:
        frozen = _constants(training)
    if frozen is not None:
        yield frozen
    if compared and (frozen is None or isinstance(frozen, Information)):
        yield passed(AT_THE_START, f"all ranks begin with the same {of_all(compared, every)}")


def _unequal_start(accused: list[RankWeights], of: int, number: int) -> Finding:
    worst = max(accused, key=lambda one: one.distance)
    size = (
        f"up to {in_two_digits(worst.distance)} of the norm" if worst.distance < float("inf") else "an unknown distance"
    )
    message = f"weights differ between ranks before the first recorded step, by {size}"
    if number:  # they may have been equal once
        return replace(
            failed_with_hint(AT_THE_START, message, f"check what changes weights before step {number}", family="sync"),
            step=number,
        )
    start = UnequalScriptStart([one.parameter.name for one in accused], of)
    return replace(explain(failed(AT_THE_START, message, parameter=worst.parameter.name), start), step=number)


@dataclass(frozen=True, eq=False)
class UnequalScriptStart(UnequalStartCase):
    """A script whose ranks begin with different weights."""

    names: Sequence[str]
    of: int

    @property
    def differing(self) -> tuple[Sequence[str], int]:
        return self.names, self.of


def _frozen(training: RecordedTraining, reduced: Collection[str]) -> Finding | None:
    """Find frozen parameters that differ between ranks, in a model whose other gradients are averaged over ranks.

    Without a wrapper, a script may intend this, as with a frozen teacher on each rank. It is a failure only if trained
    parameters must fit the frozen ones: adapters, and parameters of the same module.
    """
    is_first = all(any(step.number == 0 for step in rank.steps) for rank in training.ranks)
    noted = None
    every = zip(*(rank.noted("weights").get("modules", ()) for rank in training.ranks), strict=False)
    for index, modules in enumerate(every):
        tables = [{(p["name"], tuple(p["shape"])): p for p in module["parameters"]} for module in modules]
        if any(table.keys() != tables[0].keys() for table in tables):
            continue
        is_wrapped = is_first and all(module["wrapped"] for module in modules)
        frozen = [key for key, p in tables[0].items() if not p["trained"] and not p["ignored"] and p["digest"]]
        differing = [key[0] for key in frozen if len({table[key]["digest"] for table in tables}) > 1]
        if differing and is_wrapped:
            return _other_frozen(
                differing,
                len(frozen),
                "although DistributedDataParallel broadcast them when it was created",
                "load and initialize weights before creating DistributedDataParallel",
            )
        # The parameters of the first module have names without a class.
        prefix = f"{modules[0]['class']}." if index else ""
        trained = {name for name, _ in tables[0] if prefix + name in reduced}
        if not differing or not trained or forward_communicates(training):
            continue
        fitting = _beside(trained, dict(tables[0].keys()), differing)
        if fitting:
            return _other_frozen(
                [*fitting, *(name for name in differing if name not in fitting)],
                len(frozen),
                "although gradients of other parameters in the same modules are averaged over the ranks",
                "load the same frozen weights on all ranks, or broadcast them from one rank",
            )
        noted = noted or headline_note(
            AT_THE_START,
            f"{_differ(differing, len(frozen))}, but gradients of the same model are averaged over the ranks. If all "
            "ranks should have the same frozen weights, load them on all ranks, or broadcast them from one rank.",
        )
    return noted


def _constants(training: RecordedTraining) -> HeadlineNote | None:
    """Return a note on a module that is called without gradients only, such as a teacher, and differs between ranks."""
    if len(training.ranks) < training.world_size or forward_communicates(training):
        return None
    weights = list(weights_of(training))
    every = [rank.noted("weights").get("constants", ()) for rank in training.ranks]
    for modules in zip(*every, strict=False):
        names = [[p["name"] for p in one["parameters"]] for one in modules]
        if any(one != names[0] for one in names):
            continue
        if differing := _differing_digests(modules, "before"):
            since, advice = "", "Copy its weights when all ranks have the same, or broadcast them from one rank."
        # If trained weights differ, a moving average of them has to.
        elif not any(one.differ("after") for one in weights) and (differing := _differing_digests(modules, "after")):
            since, advice = " since a recorded step", "Update its weights on all ranks."
        else:
            continue
        what = differing_parameters(differing, len(names[0]))
        return headline_note(
            AT_THE_START,
            f"{modules[0]['class']} is called without gradients, as a teacher or a reference model is, and {what} "
            f"between ranks{since}: {listed(differing)}. If it should be the same on all ranks, the ranks train for "
            f"different targets. {advice}",
        )
    return None


def _differing_digests(modules: Sequence[Facts], when: str) -> list[str]:
    by_parameter = zip(*(one["parameters"] for one in modules), strict=True)
    return [own[0]["name"] for own in by_parameter if all(p[when] for p in own) and len({p[when] for p in own}) > 1]


def _beside(trained: Collection[str], shapes: Mapping[str, tuple[int, ...]], frozen: Sequence[str]) -> list[str]:
    """Return frozen matrices with trained parameters in the same module, or with adapters."""
    modules = {name.rpartition(".")[0] for name in trained}
    known = {name: (shape, name in trained) for name, shape in shapes.items()}
    return [
        name
        for name in frozen
        if len(shapes[name]) > 1 and (name.rpartition(".")[0] in modules or factor_pairs(name, known))
    ]


def _differ(names: Sequence[str], of: int) -> str:
    differ = "differs" if len(names) == 1 else "differ"
    parameters = counted(of, "frozen parameter")
    return f"{len(names)} of {parameters} {differ} between ranks at the first recorded forward ({listed(names)})"


def _other_frozen(names: Sequence[str], of: int, although: str, hint: str) -> Finding:
    message = f"{_differ(names, of)}, {although}"
    finding = failed_with_hint(AT_THE_START, message, hint, cause="not-broadcast", family="sync")
    return replace(finding, parameter=names[0])


def judge_ranks_agree(training: RecordedTraining) -> Iterator[Finding]:
    """Yield one finding: the first step after which weights that must agree differ between ranks, or that none do."""
    yield from failed_observers(training, "weights", AFTER_STEPS)
    if training.world_size == 1:
        return
    layout = rank_layout(training)
    reduced = reduced_parameters(training)
    known: set[str] = set()
    seen: set[str] = set()
    compared, differing_steps, parts, rounded_apart = 0, 0, set[str](), False
    for steps in training.common_steps:
        weights = list(weights_at(steps))
        differing = [one for one in weights if one.differ("after")]
        compared += bool(weights)
        if len(weights) < (every := len(steps.first.parameters)):
            parts.add(of_all(len(weights), every))
        differing_steps += bool(differing)
        rounded_apart |= any(one.share_gradient and not one.differ("before") for one in differing)
        found = [one for one in differing if one.parameter.name not in known and not one.is_rounding]
        known.update(one.parameter.name for one in differing)
        if accused := [one for one in found if must_agree(one, layout, reduced)]:
            first = any(one.parameter.name not in seen for one in accused if one.differ("before"))
            yield _parted(steps, accused, len(weights), first=first)
            return
        seen.update(one.parameter.name for one in weights)
    if not compared:
        return
    if not differing_steps:
        what = f"values of the {min(parts)} that every rank holds in full" if parts else "weights"
        yield passed(
            AFTER_STEPS, f"all ranks hold the same {what}, bit for bit, after each of {counted(compared, 'step')}"
        )
    elif layout.is_data_parallel and rounded_apart:
        yield information(
            AFTER_STEPS,
            "ranks step with the same gradient from the same weights, but round the result differently, so their "
            "weights drift apart. If the optimizer rounds at random, draw the same numbers on all ranks.",
        )
    elif layout.is_data_parallel and (apart := drift_apart(training)) is not None:
        yield _parted(apart[0], apart[1], len(list(weights_at(apart[0]))), first=False)
    elif layout.is_data_parallel and all(one.is_rounding or not one.differ("after") for one in weights_of(training)):
        yield passed(
            AFTER_STEPS, f"weights that ranks share agree up to rounding after each of {counted(compared, 'step')}"
        )
    else:
        # The reason for data parallelism does not explain weights that nothing in it keeps equal.
        reason = f"nothing keeps {listed(sorted(known))} equal" if layout.is_data_parallel else layout.reason
        why = AVERAGED if factor_of_equal_weights(training) == 1 else f"{IF_INTENDED}{reason}"
        yield information(
            AFTER_STEPS, f"ranks hold different weights after {differing_steps} of {compared} steps; {why}"
        )


def without_excuse(findings: Sequence[Finding], *, is_joint: bool) -> list[Finding]:
    """Return the findings with what the gradients tell about ranks that differ.

    If gradients are wrong or wrongly clipped, no reason excuses such ranks, and the gradients can show how they are
    reduced. ``is_joint``: the ranks compute one forward together, so they may hold parts of one model.
    """
    judged = {(one.check, one.outcome) for one in findings}
    if not judged.isdisjoint({("gradients", Outcome.FAILED), ("clipping", Outcome.FAILED)}):
        return [
            replace(one, message=one.message.replace(f"; {IF_INTENDED}{UNKNOWN}", "").replace(f"; {IF_INTENDED}", ": "))
            if one.check == AFTER_STEPS
            else one
            for one in findings
        ]
    if not is_joint or ("gradients", Outcome.PASSED) not in judged:
        return list(findings)
    told = []
    for one in findings:
        what, excuse, _ = one.message.partition(f"; {IF_INTENDED}")
        is_excused = excuse and one.check in (AT_THE_START, AFTER_STEPS)
        right = f"{what}; the gradients are right if these ranks hold parts of one model."
        told.append(replace(one, message=right) if is_excused else one)
    return told


def must_agree(weights: RankWeights, layout: RankLayout, reduced: Collection[tuple[int, str]]) -> bool:
    """Return whether a parameter must be the same on all ranks, according to its wrapper, type or gradients."""
    if weights.key in reduced or weights.is_replicated:
        return True
    return layout.is_data_parallel and (weights.is_wrapped or weights.share_gradient)


def _parted(steps: StepOfRanks[RecordedStep], accused: list[RankWeights], of: int, *, first: bool) -> Finding:
    records = {rank: ScriptStep(rank, step.number, step.optimizer, step=step) for rank, step in steps.items()}
    if (alone := skipped_on_some_ranks(records, AFTER_STEPS)) is not None:
        return alone
    worst = max(accused, key=lambda one: one.distance)
    what = differing_parameters([one.parameter.name for one in accused], of)
    message = f"{what} between ranks after the step, by up to {in_two_digits(worst.distance)} of the norm"
    finding = failed(AFTER_STEPS, message, step=steps.number, parameter=worst.parameter.name)
    return explain(finding, PartedScriptCase(accused, first_seen=first))


@dataclass(frozen=True, eq=False)
class PartedScriptCase(PartedRanksCase):
    """Parameters that differ between the ranks of a script after a step; ``first_seen``: no earlier step is known.

    Learning rates are left out, because their own check reports them.
    """

    accused: Sequence[RankWeights]
    first_seen: bool

    @property
    def first_difference(self) -> tuple[FirstDifference, Match]:
        if any(one.differ("before") for one in self.accused):
            return ("weights before the first step" if self.first_seen else "weights before a step"), Match()
        return ("gradients" if any(one.differ("gradients") for one in self.accused) else "update"), Match()


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
    modules = [module for rank in training.ranks for module in rank.noted(LAYOUT).get("modules", ())]
    return bool(modules) and all(module["wrapper"] or module["sharded_as_data"] for module in modules)


def _trained_on_some(training: RecordedTraining) -> Finding | None:
    common = list(training.common_steps)
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
    modules = rank.noted(WEIGHTS).get("modules", ())
    return {one["name"]: one["trained"] for module in modules for one in module["parameters"] if not one["ignored"]}


def _trained(steps: Iterable[RecordedStep]) -> set[str]:
    """Return trainable parameters, with or without an optimizer on this rank: ranks may share parameters out."""
    found: set[str] = set()
    for step in steps:
        found |= {one.name for one in step.parameters if one.named and one.trained}
        found |= step.noted("unoptimized").keys()
    return found


def _used_on_some(training: RecordedTraining) -> list[str]:
    """Return parameters whose gradients come from the same ranks at each of several steps, and not from the others."""
    modules = training.ranks[0].noted(WEIGHTS).get("modules", ())
    if all(parameter["trained"] for module in modules for parameter in module["parameters"]):
        return []
    users: dict[str, list[frozenset[int]]] = {}
    world = set(range(training.world_size))
    for steps in training.common_steps:
        if not steps.is_one:
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
