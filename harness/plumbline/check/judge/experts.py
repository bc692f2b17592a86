"""Checks routers of experts: their gradients, their balancing losses, and tokens that no expert receives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from plumbline.check.evidence.training import BackwardPass, Facts, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.noted import amount, failed_observers, headline_note, information, name_ranks, passes_of
from plumbline.check.judge.rank_weights import rank_layout, weights_at
from plumbline.check.judge.step_objective import equals, factor_of, step_objectives, steps_together
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.evidence.training_record import StepOfRanks
from plumbline.report.text import listed, percent

CHECK = "experts"

_LEAST_STEPS = 3
"""Steps without a gradient from which a router is reported. Two can be right: experts may begin as zeros, and the
learning rate may begin with 0."""

_SAME_TOKEN = 2.0**-8
"""Relative difference of one token's numbers on two ranks: the last digits of bfloat16."""

_NOISE = 2.0**-26
"""A gradient this much smaller in float64 than in the training's precision is rounding: half of float64's digits."""


def judge_experts(training: RecordedTraining) -> Iterator[Finding]:
    """Yield notes on routers: no gradient, a balancing loss that is weighted unlike the main loss, unrouted tokens."""
    yield from failed_observers(training, CHECK, CHECK)
    if not any(one.noted(CHECK) for rank in training.ranks for one in passes_of(rank)):
        return
    yield from _without_gradient(training)
    yield from _only_balanced(training)
    yield from _without_effect(training)
    yield from _weighed_otherwise(training)
    yield from _left_out(training)
    yield from _disagreeing(training)


def _without_gradient(training: RecordedTraining) -> Iterator[Finding]:
    routers: dict[str, dict[str, None]] = {}
    moved: set[str] = set()
    for rank in training.ranks:
        for one in passes_of(rank):
            for router, facts in one.noted(CHECK).get("routers", {}).items():
                routers.setdefault(router, {}).update(dict.fromkeys(facts["parameters"]))
                moved.update(facts["moved"])
    for router, names in routers.items():
        # A bias that balances experts is only added to the scores and needs no gradient. The scores need one.
        numbers = [_steps_without_gradient(training, name) for name in names]
        if names and not moved & names.keys() and all(one >= _LEAST_STEPS for one in numbers):
            yield headline_note(
                CHECK,
                f"{router} selects experts by scores computed with {listed([*names])}, but no gradient reached "
                f"{'it' if len(names) == 1 else 'them'} in {counted(numbers[0], 'step')}. Multiply each selected "
                "expert's output by its score, and do not detach the score.",
            )


def _only_balanced(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what trains routers that the main loss does not reach."""
    noted = [facts for rank in training.ranks for one in passes_of(rank) if (facts := one.noted(CHECK))]
    if not all(facts["balancing"] for facts in noted):
        return
    routers = [each for facts in noted for each in facts["routers"].items()]
    others = {name for name, router in routers if router["reached"] or not router["balanced"]}
    if alone := sorted({name for name, _ in routers} - others):
        yield information(
            CHECK,
            f"no gradient of the main loss reaches the scores of {listed(alone)}: only losses that are computed from "
            "the scores alone, such as a balancing loss, train them. Multiply each selected expert's output by its "
            "score, and do not detach the score, unless this is intended.",
        )


def _steps_without_gradient(training: RecordedTraining, name: str) -> int:
    """Return the number of steps of a parameter without a gradient, 0 if it had one in any step."""
    found = [(step, place) for rank in training.ranks for step, place in _steps_of(rank, name)]
    return len({step.number for step, _ in found}) if all(_has_no_gradient(*one) for one in found) else 0


def _steps_of(rank: RecordedRank, name: str) -> Iterator[tuple[RecordedStep, int]]:
    for step in rank.steps:
        for index, parameter in enumerate(step.parameters):
            if parameter.name == name and parameter.length and parameter.trained:
                yield step, index


def _has_no_gradient(step: RecordedStep, place: int) -> bool:
    received = float(step.parts(step.received)[place].nan_to_num().norm())
    if not step.passes or any(one.facts.get("distributed") or one.facts.get("in_flat_parts") for one in step.passes):
        return False
    return received == 0 or all(_is_rounding(step, one, place) for one in step.passes)


def _is_rounding(step: RecordedStep, one: BackwardPass, place: int) -> bool:
    local = float(step.parts(one.local)[place].norm())
    exact = math.nan if one.exact is None else float(step.parts(one.exact)[place].norm())
    return not local or exact <= _NOISE * local


def _without_effect(training: RecordedTraining) -> Iterator[Finding]:
    noted = [facts for rank in training.ranks for one in passes_of(rank) if (facts := one.noted(CHECK))]
    dropped = sorted({name for facts in noted for name in facts.get("dropped", ())})
    routers = sorted({name for facts in noted for name in facts["routers"]})
    if dropped:
        yield headline_note(
            CHECK,
            f"A loss computed from router scores is passed to {listed(dropped)}, but the return value is not used, so "
            "this loss has no gradient. Use the returned tensor in place of the one that was passed in.",
        )
    elif all(facts.get("constant") and not facts["balancing"] for facts in noted) and not _is_biased(noted):
        held = noted[0]["constant"]
        yield headline_note(
            CHECK,
            f"A constant is added to the loss: {listed(held)} {'has' if len(held) == 1 else 'have'} no gradient, so "
            f"nothing balances {listed(routers)}. Counts of selected experts have no gradient: multiply each expert's "
            "share of the tokens by its mean router score.",
        )


def _is_biased(noted: Sequence[Facts]) -> bool:
    """Return whether a router holds a number for each expert without a gradient, which may balance the experts."""
    return any(router["is_biased"] for facts in noted for router in facts["routers"].values())


def _weighed_otherwise(training: RecordedTraining) -> Iterator[Finding]:
    ranks = training.ranks if rank_layout(training).is_data_parallel else training.ranks[:1]
    totals = [one.total for one in step_objectives(ranks)]
    for index, steps in enumerate(steps_together(ranks)):
        total = totals[index] if index < len(totals) else _total_of_means(steps)
        if total is None or not equals(total, 1.0):
            return
        count = len(steps[0].passes)
        if any(len(step.passes) != count for step in steps):
            return
        for kind in _kinds(steps):
            said = _told(kind, _times(steps, kind, count), count, len(ranks))
            if said:
                yield headline_note(CHECK, said)
                return


def _kinds(steps: Sequence[RecordedStep]) -> list[Facts]:
    """Return the balancing losses of the first pass in order; nothing if other passes of the step differ."""
    each = [one.noted(CHECK).get("balancing", []) for step in steps for one in step.passes]
    alike = {tuple((tuple(one["own"]), one["function"], one["times"]) for one in own) for own in each}
    return each[0] if len(alike) == 1 else []


def _times(steps: Sequence[RecordedStep], kind: Facts, count: int) -> float:
    """Return the weight of a balancing loss in a step as a multiple of its coefficient, averaged over ranks."""
    place = _kinds(steps).index(kind)
    weight = sum(one.noted(CHECK)["balancing"][place]["weight"] / one.scale for step in steps for one in step.passes)
    own = kind["own"]
    if len(own) > 1 and count > 1 and equals(own[0], 1 / count):
        own = own[1:]  # the first factor divides by the number of micro-batches
    elif count > 1 and any(equals(one, 1 / count) for one in own):
        return math.nan  # one factor may do so, or be a coefficient
    product = math.prod(own)
    return factor_of(steps) * weight / len(steps) / product if product else math.nan


def _told(kind: Facts, times: float, count: int, ranks: int) -> str:
    """Return the note on a balancing loss with ``times`` times its coefficient, "" if that is right."""
    name = f"The balancing loss that {kind['function']} attaches" if kind["function"] else "The balancing loss"
    if math.isnan(times) or equals(times, 1.0):
        return ""
    if kind["times"] > 1 and equals(times, kind["times"]):
        return f"{name} is added {kind['times']} times in each backward pass. Add it once."
    parts = {count: f"{count} micro-batches", ranks: f"{ranks} ranks"}
    for number, what in {count * ranks: f"{count} micro-batches on each of {ranks} ranks", **parts}.items():
        if number > 1 and equals(times, number):
            return (
                f"{name} counts {number} × its coefficient in a step of {what}, while the main loss is a mean over "
                f"them. Divide it by {number} if a mean is intended."
            )
    if count > 2 and equals(times, 1 / count):
        return (
            f"{name} is divided by {count} twice in a step of {count} micro-batches, and the main loss once. Divide it "
            "once."
        )
    if kind["function"] and any(_is_power_of_two(times / number) for number in (1, *parts)):
        return (
            f"{name} counts {times:.3g} × its coefficient in a step, while the main loss is a mean of weight 1. Pass "
            "the function the factor by which the main loss is multiplied, including the loss scale."
        )
    return ""


def _is_power_of_two(number: float) -> bool:
    """Return whether a factor is a power of two, like a loss scale. Others may be a coefficient of the function."""
    return number > 0 and any(equals(math.frexp(number)[0], one) for one in (0.5, 1.0))


def _total_of_means(steps: Sequence[RecordedStep]) -> float | None:
    """Return the total weight of the main losses in a step, None if they are not all means."""
    total = 0.0
    for step in steps:
        for one in step.passes:
            main = one.noted(CHECK).get("main", [])
            if len(main) != 1 or not main[0][1]:
                return None
            total += main[0][0] / one.scale
    return factor_of(steps) * total / len(steps)


def _left_out(training: RecordedTraining) -> Iterator[Finding]:
    without: dict[str, dict[int, list[int]]] = {}
    for rank in training.ranks:
        for one in passes_of(rank):
            for router, facts in one.noted(CHECK).get("routers", {}).items():
                if facts["without"] is not None:
                    counts = without.setdefault(router, {}).setdefault(rank.rank, [0, 0])
                    counts[0] += facts["without"]
                    counts[1] += facts["tokens"]
    for router, ranks in without.items():
        lost, tokens = (sum(each[place] for each in ranks.values()) for place in (0, 1))
        if lost:
            shares = sorted(each[0] / each[1] for each in ranks.values())
            apart = f", between {percent(shares[0])} and {percent(shares[-1])} on a rank" if len(shares) > 1 else ""
            message = f"{amount(lost)} of {amount(tokens)} tokens ({percent(lost / tokens)}{apart}) reach no expert"
            yield information(
                CHECK, f"{message} of {router}, or are masked: the module around it returns zeros for them."
            )


def _disagreeing(training: RecordedTraining) -> Iterator[Finding]:
    """Yield a note if ranks with the same router and the same samples in the first step choose different experts."""
    if len(training.ranks) < 2 or rank_layout(training).is_data_parallel:
        return
    steps = next(training.common_steps, StepOfRanks())
    apart = {one.parameter.name for one in weights_at(steps) if one.differ("before")}
    for passes in zip(*(step.passes for step in steps.values()), strict=False):
        groups: dict[str, list[int]] = {}
        for rank, one in zip(steps, passes, strict=True):
            orders = [made.get("order") for made in one.noted("batches").get("forwards", ())]
            if orders and None not in orders:
                groups.setdefault(repr(orders), []).append(rank)
        noted = {rank: one.noted(CHECK).get("routers", {}) for rank, one in zip(steps, passes, strict=True)}
        for ranks in groups.values():
            for router, share in _apart([noted[rank] for rank in ranks], apart):
                who = name_ranks(ranks, len(training.ranks))
                yield headline_note(
                    CHECK,
                    f"{who[0].upper()}{who[1:]} are given the same samples, but {router} sends {percent(share)} of the "
                    "tokens to different experts on different ranks. Use the same noise on ranks that share samples.",
                )
                return


def _apart(routers: Sequence[dict[str, Any]], unequal: set[str]) -> Iterator[tuple[str, float]]:
    for router, facts in routers[0].items() if len(routers) > 1 else ():
        if not all(router in one and one[router]["tokens"] == facts["tokens"] for one in routers):
            continue
        if unequal & set(facts["parameters"]):
            continue
        noted = [_by_token(one[router]) for one in routers]
        # Each rank may have its part of a batch's tokens, as in sequence parallelism.
        tokens = [
            [experts for _, experts in own]
            for own in zip(*noted, strict=False)
            if _is_one(*(token for token, _ in own)) and all(experts is not None for _, experts in own)
        ]
        other = sum(len(set(own)) > 1 for own in tokens)
        if other:
            yield router, other / len(tokens)


def _by_token(router: Facts) -> list[tuple[float, int | None]]:
    return list(zip(router["given"] or (), router["experts"], strict=False))


def _is_one(*tokens: float) -> bool:
    return max(tokens) - min(tokens) <= _SAME_TOKEN * max(map(abs, tokens))
