"""Checks that frozen weights do not change: by an optimizer, or because adapters are merged into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.noted import ObserverFacts, failed_observers, information, noted
from plumbline.check.judge.replayed_updates import OBSERVER as UPDATE
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.report.text import listed

CHECK, OBSERVER = "update", "frozen-weights"


def judge_frozen_weights(training: RecordedTraining) -> Iterator[Finding]:
    """Yield the first thing that is wrong with frozen weights, or a note that something changes them between steps."""
    yield from failed_observers(training, OBSERVER, CHECK)
    every = list(noted(training, OBSERVER))
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
    facts = [rank.facts.get(OBSERVER) or {} for rank in training.ranks]
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
    moved = Counter(name for step in steps for name in (step.facts.get(OBSERVER) or {}).get("between", ()))
    return {name for name in one.facts["between"] if moved[name] == 1 and len(steps) > 2}


def _merged(one: ObserverFacts, once: Collection[str]) -> Finding | None:
    """Return the failure of an adapter that was added to its frozen weights, but stays and has gradients afterwards.

    An adapter that changed as well may have lost what was added.
    """
    changed = {one.parameter(number) for number in (one.step.facts.get(UPDATE) or {}).get("outside", ())}
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
