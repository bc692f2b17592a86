"""Finds parameters that no optimizer or only some ranks' hold, optimizers of stale ones, and frozen ones that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from plumbline.check.evidence.training import Facts, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.judged_gradients import STEPPED_ALONE, differ_when_divided, judged_gradients
from plumbline.check.judge.noted import ObserverFacts, failed_observers, headline_note, information, noted
from plumbline.check.judge.rank_weights import WEIGHTS, reduced_parameters, weights_at
from plumbline.check.judge.replayed_updates import OBSERVER as UPDATE
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import in_two_digits, listed

CHECK = "update"

UNOPTIMIZED = "unoptimized"
"""The fact of a step with the parameters of called modules that are in no optimizer."""

_FEWEST_STEPS = 3  # a script may copy its weights at every second step

_ROUNDED = 2**-7  # more than rounding to bfloat16 moves a weight, in any direction


def judge_optimized_parameters(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what is wrong, or which parameters no optimizer moves: whether that is intended is unknown."""
    found = (
        next(_replaced(training), None)
        or _added_later(training)
        or _stale_masters(training)
        or _missing_on_some_ranks(training)
        or _not_copied_back(training)
        or _not_shared(training)
        or _gradients_alone(training)
        or _never_moved(training)
    )
    if found is not None:
        yield found


def _never_moved(training: RecordedTraining) -> Finding | None:
    for rank in training.ranks:
        late = {name for parameters in rank.noted("late").values() for name in parameters}
        names = [name for step in rank.steps[-1:] for name in step.noted(UNOPTIMIZED) if name not in late]
        if names:
            one = len(names) == 1
            told = (
                f"{counted(len(names), 'parameter')} require{'s' if one else ''} a gradient and "
                f"{'is' if one else 'are'} in no optimizer, so {'it never moves' if one else 'they never move'}: "
                f"{listed(names)}. Add {'it' if one else 'them'} to an optimizer unless this is intended"
            )
            # One that no rank takes, if they divide the parameters, or no group of a module is probably forgotten.
            modules = {parameter.name.rpartition(".")[0] for step in rank.steps for parameter in step.parameters}
            is_divided = any(step.is_divided for step in rank.steps)
            is_forgotten = is_divided or not modules.isdisjoint(name.rpartition(".")[0] for name in names)
            return headline_note(CHECK, f"{told}.") if is_forgotten else information(CHECK, told)
    return None


def _added_later(training: RecordedTraining) -> Finding | None:
    """Find adapters that were added to a partly frozen model after its optimizer was created.

    They have gradients but no optimizer, and nothing else moves them.
    """
    for rank, names, is_adapter in _later(training):
        if is_adapter:
            one = len(names) == 1
            return failed_with_hint(
                CHECK,
                f"{counted(len(names), 'parameter')} {'was' if one else 'were'} added to a partly frozen model after "
                f"the optimizer was created, and {'is' if one else 'are'} in no optimizer, so "
                f"{'it never moves' if one else 'they never move'} although backward passes compute gradients: "
                f"{listed(names)}",
                "create the optimizer after all adapters are added, or pass them to add_param_group() on every rank",
                cause="added-after-the-optimizer",
                family="optimizer",
                step=rank.steps[-1].number,
                rank=rank.rank,
                parameter=names[0],
            )
    return None


def _gradients_alone(training: RecordedTraining) -> Finding | None:
    """Find other parameters that were added later. A script may only read their gradients, as for masks."""
    for _, names, _ in _later(training):
        was, it = ("was", "it") if len(names) == 1 else ("were", "them")
        return headline_note(
            CHECK,
            f"Backward passes compute gradients of {counted(len(names), 'parameter')} that {was} added after the "
            f"optimizer was created, but no optimizer moves {it}: {listed(names)}. To train {it}, call "
            "add_param_group() on every rank.",
        )
    return None


def _later(training: RecordedTraining) -> Iterator[tuple[RecordedRank, list[str], bool]]:
    """Yield, for each rank, the parameters added later to a partly frozen model, and whether any is an adapter's."""
    for rank in training.ranks:
        late = {name for parameters in rank.noted("late").values() for name in parameters}
        steps = [step.noted(UNOPTIMIZED) for step in rank.steps if not step.skipped]
        names = [name for name in (steps[-1] if steps else ()) if name not in late and _stays(name, steps)]
        if names:
            yield rank, names, any(steps[-1][name]["adapts"] for name in names)


def _stays(name: str, steps: Sequence[Facts]) -> bool:
    """Return whether a later parameter has a gradient in the last steps, and the same values in all of them."""
    own = [step[name] for step in steps if name in step]
    values = {one["digest"] for one in own}
    is_later = all(one["later"] and one["beside_frozen"] and one["gradient"] for one in own)
    return len(own) > 1 and is_later and len(values) == 1 and None not in values


def _replaced(training: RecordedTraining) -> Iterator[Finding]:
    """Find optimizers with parameters of no model or only frozen ones, while others of the same shapes are in none."""
    for rank in training.ranks:
        for optimizer in dict.fromkeys(step.optimizer for step in rank.steps):
            steps = [step for step in rank.steps if step.optimizer == optimizer]
            stale = _stale(steps)
            own = {name: facts for name, facts in steps[-1].noted(UNOPTIMIZED).items() if facts["gradient"]}
            shapes = Counter(tuple(shape) for facts in own.values() for shape in facts["shapes"])
            if not stale or not Counter(steps[-1].parameters[number].shape for number in stale) <= shapes:
                continue
            name = steps[-1].facts.get("update", {}).get("class") or "the optimizer"
            are, move = ("is", "moves") if len(own) == 1 else ("are", "move")
            are_unused = not steps[-1].parameters[stale[0]].named
            yield failed_with_hint(
                CHECK,
                f"{name} holds {counted(len(stale), 'parameter')} without gradients that "
                f"{'no module uses' if are_unused else 'are frozen'}, while "
                f"{counted(len(own), 'parameter')} of the model with gradients {are} in no optimizer and never {move} "
                f"({listed(own)})",
                "create the optimizer after all code that replaces parameters, such as fully_shard, a change of layers "
                "or a copy of the model, and after all adapters are added and one is chosen",
                cause="optimizer-holds-other-parameters",
                family="optimizer",
                step=steps[0].number,
                rank=rank.rank,
                parameter=next(iter(own)),
            )


def _stale(steps: list[RecordedStep]) -> list[int]:
    """Return the numbers of an optimizer's parameters that no called module holds and that never got a gradient.

    If all of its parameters are frozen, they count as well.
    """
    are_frozen = not any(one.trained for one in steps[-1].parameters)
    return [
        number
        for number, parameter in enumerate(steps[-1].parameters)
        if (are_frozen or not parameter.named)
        and parameter.sampled
        and all(
            number >= len(step.parameters) or not bool(step.parts(step.received)[number].nan_to_num().any())
            for step in steps  # the optimizer may have been given it later
        )
    ]


def _stale_masters(training: RecordedTraining) -> Finding | None:
    """Find model weights that a step replaced because the master weights had different values."""
    for rank in training.ranks:
        last: dict[int, tuple[RecordedStep, Mapping[str, float]]] = {}
        for step in rank.steps:
            masters = step.facts.get("masters")
            if not masters or step.skipped:
                continue
            stale = masters["stale"]
            before, apart = last.get(step.optimizer, (step, {}))
            if masters["stale_before"]:  # when the pieces were not known yet
                before, apart = replace(step, number=step.number - 1), masters["stale_before"]
            names = {before.parameters[int(number)].name: far for number, far in apart.items() if far > _ROUNDED}
            if names and not stale:
                return failed_with_hint(
                    CHECK,
                    "the model's weights differed from those that the optimizer updates by up to "
                    f"{in_two_digits(max(names.values()))} of their norm, and the step overwrote them "
                    f"({listed(names)})",
                    "after loading weights into the model, copy them to the master weights",
                    cause="stale-master-weights",
                    family="checkpoint",
                    step=before.number,
                    rank=rank.rank,
                    parameter=next(iter(names)),
                )
            last[step.optimizer] = step, stale
    return None


def _not_copied_back(training: RecordedTraining) -> Finding | None:
    """Find models whose weights do not change while optimizers update copies of them."""
    every: dict[tuple[int, int], list[RecordedStep]] = {}
    for rank in training.ranks:
        for step in rank.steps:
            if step.is_in_pieces and not step.skipped:
                every.setdefault((rank.rank, step.optimizer), []).append(step)
    for (where, _), steps in every.items():
        if names := _left_behind(steps):
            return failed_with_hint(
                CHECK,
                f"the optimizer updates copies of the model's weights, but {listed(names)} of the model never "
                f"{'changes' if len(names) == 1 else 'change'}, while other weights follow their copies",
                "after each step, copy all updated weights to the model",
                cause="masters-not-copied-back",
                family="optimizer",
                step=steps[1].number,
                rank=where,
                parameter=names[0],
            )
    later = [step for steps in every.values() for step in steps[1:]]
    noted = [[step.facts["masters"] for step in steps] for steps in every.values()]
    stays = all(one["prints"] == steps[0]["prints"] for steps in noted for one in steps)
    if not later or not stays or not any(step.facts["masters"]["stale"] for step in later):
        return None
    return headline_note(
        CHECK,
        "The optimizer updates copies of the model's weights, but the model's own weights do not change. Copy the "
        "updated weights to the model after each step.",
    )


def _not_shared(training: RecordedTraining) -> Finding | None:
    """Find parameters, each stepped by one rank, whose updates other ranks do not get, or the rank itself loses."""
    last: Mapping[int, RecordedStep] = {}
    for steps in training.common_steps:
        if not all(one.is_divided for one in steps.values()):
            continue
        why = "do not reach all ranks"
        if not (names := differ_when_divided(steps)):
            names, why = [name for rank, one in last.items() for name in _undone(one, steps[rank])], "are lost"
        if names and STEPPED_ALONE not in judged_gradients(training).unjudged:
            return failed_with_hint(
                CHECK,
                f"each rank steps other parameters of the model, but the updates of {listed(names)} {why}",
                "after each step, broadcast every parameter from the rank whose optimizer updates it",
                cause="updates-not-broadcast",
                family="sync",
                step=steps.number - 1,
                parameter=names[0],
            )
        last = steps
    return None


def _undone(before: RecordedStep, after: RecordedStep) -> list[str]:
    """Return the parameters that this rank has stepped, but that have their old values again before the next step."""
    moved = zip(before.facts[WEIGHTS]["before"], before.facts[WEIGHTS]["after"], strict=True)
    changed = [was != made for was, made in moved]
    digests = zip(before.parameters, before.facts["masters"]["divided"], after.facts["masters"]["divided"], strict=True)
    return [one.name for one, was, now in digests if one.is_held and changed[one.held_in or 0] and was == now]


def _left_behind(steps: Sequence[RecordedStep]) -> list[str]:
    """Return the pieces that equal their copies at the first step and never change, although others follow theirs."""
    noted = [step.facts["masters"] for step in steps]
    if len(steps) < _FEWEST_STEPS or any(step.parameters != steps[0].parameters for step in steps):
        return []
    moves = [len(set(prints)) > 1 for prints in zip(*(one["prints"] for one in noted), strict=True)]
    when = [[f"{number}" in one["stale"] for one in noted] for number in range(len(moves))]
    if not any(moved and not any(stale) for moved, stale in zip(moves, when, strict=True)):
        return []
    return [
        one.name
        for number, (one, moved, stale) in enumerate(zip(steps[0].parameters, moves, when, strict=True))
        if not moved and not stale[0] and all(stale[1:]) and noted[-1]["stale"][f"{number}"] > _ROUNDED
    ]


def _missing_on_some_ranks(training: RecordedTraining) -> Finding | None:
    reduced = reduced_parameters(training)
    equal: set[str] = set()
    for steps in training.common_steps:
        names = {name for step in steps.values() for name in step.noted(UNOPTIMIZED)}
        digests = {name: _digests(name, steps) for name in sorted(names)}
        is_reduced = any(optimizer == steps.optimizer for optimizer, _ in reduced)
        is_one_model = is_reduced or any(one.is_wrapped for one in weights_at(steps))
        apart = [name for name in equal if len(set(digests.get(name, {}).values())) > 1]
        if apart and is_one_model:
            return _lacking(training.ranks, apart, steps, "so the ranks drift apart")
        if in_part := _flat_in_part(names, steps):
            return _lacking(training.ranks, in_part, steps, "so the parts on these ranks never change")
        equal |= {name for name, found in digests.items() if len(found) == len(steps) and len(set(found.values())) == 1}
    return None


def _digests(name: str, steps: Mapping[int, RecordedStep]) -> dict[int, str]:
    """Return, for each rank, a digest of a parameter's values before a step, even if its optimizer lacks it."""
    found = {}
    for rank, step in steps.items():
        own = step.noted(UNOPTIMIZED).get(name, {}).get("digest")
        for parameter, before in zip(step.parameters, step.noted(WEIGHTS).get("before", ()), strict=False):
            own = before if parameter.name == name and parameter.held_in is None else own
        if own is not None:
            found[rank] = own
    return found


def _flat_in_part(names: Collection[str], steps: Mapping[int, RecordedStep]) -> list[str]:
    """Return parameters inside flat ones that some optimizers hold, but not those of all ranks with a part."""
    stepped = {one.name for step in steps.values() for one in step.parameters}
    lacking = {name for step in steps.values() for name, facts in step.noted(UNOPTIMIZED).items() if facts["in_flat"]}
    return sorted(set(names) & stepped & lacking)


def _lacking(
    ranks: Collection[RecordedRank], names: list[str], steps: Mapping[int, RecordedStep], effect: str
) -> Finding | None:
    lacking = [rank.rank for rank in ranks if any(name in steps[rank.rank].noted(UNOPTIMIZED) for name in names)]
    if len(lacking) == len(ranks):
        return None
    are = "is" if len(names) == 1 else "are"
    return failed_with_hint(
        CHECK,
        f"{counted(len(names), 'parameter')} ({listed(sorted(names))}) {are} in the optimizer of some ranks, but not "
        f"on {'rank' if len(lacking) == 1 else 'ranks'} {listed(lacking)}, {effect}",
        "give the optimizer of every rank the same parameters",
        cause="missing-on-some-ranks",
        family="optimizer",
        step=steps[lacking[0]].number,
        rank=lacking[0],
        parameter=sorted(names)[0],
    )


FROZEN = "frozen-weights"


def judge_frozen_weights(training: RecordedTraining) -> Iterator[Finding]:
    """Yield the first thing that is wrong with frozen weights, or a note that something changes them between steps."""
    yield from failed_observers(training, FROZEN, CHECK)
    every = list(noted(training, FROZEN))
    changed = [one for one in every if one.facts["between"]]
    merged = (_merged(one, _changed_once(one, training)) for one in changed)
    stepped = (_stepped(one, _given_gradients(one.rank, every)) for one in every)
    found = next(filter(None, stepped), None) or next(filter(None, merged), None)
    if found is not None:
        yield found
        return
    if changed:
        yield _changed(changed[0])
    elif names := _unnoticed(training):
        what = counted(len(names), "frozen parameter")
        yield information(CHECK, f"some entries of {what} changed while steps were recorded: {listed(names)}")


def _unnoticed(training: RecordedTraining) -> list[str]:
    facts = [rank.noted(FROZEN) for rank in training.ranks]
    return sorted({name for one in facts for name in one.get("unnoticed", ())})


def _given_gradients(rank: int, every: Sequence[ObserverFacts]) -> set[str]:
    """Return frozen parameters whose gradients the script sets itself, such as the biases of a router."""
    within = [one.facts["within"] for one in every if one.rank == rank]
    return {name for own in within for name in own if own[name]["gradient"] == "own"}


def _stepped(one: ObserverFacts, given: Collection[str]) -> Finding | None:
    """Return the failure of a step that trains other parameters and moves frozen ones without a gradient of its own.

    Parameters to which the script gives gradients at other steps (``given``) are trained, and are left out. Their
    gradient may be zero.
    """
    within = one.facts["within"]
    kinds = {name: within[name]["gradient"] for name in within if name not in given}
    names = list(kinds)
    if one.step.skipped or not names or not _trains(one):
        return None
    zero = kinds[names[0]] == "zero"
    names = [name for name in names if kinds[name] == kinds[names[0]]]
    is_one = len(names) == 1
    return one.failed(
        CHECK,
        f"{counted(len(names), 'frozen parameter')} ({listed(names)}) {'is' if is_one else 'are'} moved by the step, "
        + ("by weight decay or momentum: .grad is zero and not None" if zero else "along .grad of an earlier step"),
        "set .grad of frozen parameters to None, or give the optimizer trainable parameters only",
        cause="frozen-parameter-trained",
        family="optimizer",
        parameter=names[0],
    )


def _trains(one: ObserverFacts) -> bool:
    """Return whether the step trains other parameters, which backward passes reach."""
    return any(each.trained for each in one.step.parameters) and any(bool(p.local.any()) for p in one.step.passes)


def _changed_once(one: ObserverFacts, training: RecordedTraining) -> set[str]:
    """Return frozen weights that change before this step only, if the rank has at least three recorded steps.

    Methods that move frozen weights along with adapters, such as Delta-LoRA (arXiv 2309.02411), do so in each step.
    """
    steps = next(rank.steps for rank in training.ranks if rank.rank == one.rank)
    moved = Counter(name for step in steps for name in step.noted(FROZEN).get("between", ()))
    return {name for name in one.facts["between"] if moved[name] == 1 and len(steps) > 2}


def _merged(one: ObserverFacts, once: Collection[str]) -> Finding | None:
    """Return the failure of an adapter that was added to its frozen weights, but stays and has gradients afterwards.

    An adapter that changed as well may have lost what was added.
    """
    changed = {one.parameter(number) for number in one.step.noted(UPDATE).get("outside", ())}
    gradients = dict(zip([p.name for p in one.step.parameters], one.step.parts(one.step.received), strict=True))
    for name, change in one.facts["between"].items():
        left, right, factor = change["product"] or (None, None, 0.0)
        used = [each for each in (left, right) if each in gradients and bool(gradients[each].nan_to_num().any())]
        if factor > 0 and len(used) == 2 and name in once and changed.isdisjoint(used):
            return one.failed(
                CHECK,
                f"{factor:.4g} × the product of {left} and {right} was added to the frozen {name} between two "
                f"steps, but {left} and {right} stay and have gradients, so the model counts their product twice",
                "merge adapters into a copy of the model, or unmerge them before training goes on",
                cause="merged-and-trained-on",
                family="checkpoint",
                parameter=name,
            )
    return None


def _changed(one: ObserverFacts) -> Finding:
    between = one.facts["between"]
    factors = {f"{change['factor']:.6g}" if change["factor"] else "" for change in between.values()}
    was = "was" if len(between) == 1 else "were"
    how = f"{was} multiplied by {next(iter(factors))}" if len(factors) == 1 and "" not in factors else "changed"
    return information(
        CHECK,
        f"{counted(len(between), 'frozen parameter')} {how} between two optimizer steps, first before {one.name} on "
        f"rank {one.rank}: {listed(between)}. Possible reasons: a moving average of weights, weight decay by the "
        "script, adapters that are merged",
        one.step.number,
    )
