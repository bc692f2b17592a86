"""Determines the optimised objective: the weight of each loss term of each micro-batch and rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from plumbline.check.evidence.training import BackwardPass, Facts, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.declared_objective import judge_declared
from plumbline.check.judge.noted import (
    STEPS_WITHIN_PASSES,
    HeadlineNote,
    amount,
    failed_observers,
    headline_note,
    information,
    not_judged,
    passes_of,
    steps_within_passes,
)
from plumbline.check.judge.rank_weights import rank_layout
from plumbline.check.judge.step_objective import (
    EXACT,
    NEAR,
    StepObjective,
    equals,
    factor_of,
    forwards_by_pass,
    have_own_batches,
    is_sum_of_calls,
    loss_passes,
    spread,
    step_objectives,
    steps_together,
)
from plumbline.core.finding import Finding
from plumbline.core.numbers import counted
from plumbline.core.outcome import Outcome
from plumbline.judge.findings import failed_with_hint
from plumbline.report.text import in_words, listed

CHECK = "objective"

_MEANS = ("mean", "batchmean")

_PARTS = {0.5: "half of ", 2.0: "twice "}


def judge_objective(training: RecordedTraining) -> Iterator[Finding]:
    """Yield what was optimised, or a missing or doubled division by the number of micro-batches."""
    yield from failed_observers(training, "objective", CHECK)
    if training.objective:
        yield from judge_declared(training)
        return
    if not any(step.passes for step in training.steps):
        return
    if any(step.weights_move_between_passes for step in training.steps):
        why = "the loss is not known: the weights change between the backward passes of a step"
        yield Finding(CHECK, Outcome.SKIPPED, why)
        return
    several = _by_passes(training.ranks)
    told = set()
    for optimizers, ranks in several.items():
        of = f" of {listed([f'optimizer {number}' for number in optimizers])}" if len(several) > 1 else ""
        for finding in _judge_loss(training, ranks, of):
            if (same := (type(finding), finding.message)) not in told:
                told.add(same)
                yield finding


def _by_passes(ranks: Sequence[RecordedRank]) -> dict[tuple[int, ...], list[RecordedRank]]:
    """Return the ranks' steps, apart for optimizers with different backward passes, as those of two models."""
    passes: dict[int, set[int]] = {}
    for step in (step for rank in ranks for step in rank.steps):
        passes.setdefault(step.optimizer, set()).update(one.number for one in step.passes)
    groups: dict[frozenset[int], list[int]] = {}
    for optimizer, own in sorted(passes.items()):
        groups.setdefault(frozenset(own), []).append(optimizer)
    return {
        tuple(own): [replace(rank, steps=tuple(one for one in rank.steps if one.optimizer in own)) for rank in ranks]
        for own in groups.values()
    }


def _judge_loss(training: RecordedTraining, ranks: Sequence[RecordedRank], of: str) -> Iterator[Finding]:
    """Yield what was optimised by these steps. ``of``: of which optimizers they are, "" if they are all."""
    averaged = rank_layout(training).is_data_parallel
    # If gradients are not known to be averaged, each rank has its own objective. Report the first one.
    is_own = not averaged and training.world_size > 1
    if is_own:  # some stages of a pipeline have no loss
        ranks = [next((one for one in ranks if any(map(_noted, passes_of(one)))), ranks[0])]
    objectives = list(step_objectives(ranks, written=True))
    if objectives and (wrong := divided_wrongly(objectives, of) or _divided_by_all_so_far(objectives, of)) is not None:
        yield wrong
        return
    if (summed := summed_micro_batches(ranks, of)) is not None:
        yield summed
    added = _added_terms(ranks)
    sometimes = None if added else _added_to_some(ranks)
    if objectives:
        rank = ranks[0].rank if is_own else None
        is_a_term = bool(added or sometimes)
        yield information(CHECK, _optimised(_without_clipping(objectives), rank, of, is_a_term=is_a_term))
    notes = [_short_windows(objectives)]
    if not is_own:
        notes += [None if added else _counted_by_ranks(objectives), _averaged_again(ranks, objectives)]
    yield from (note for note in notes if note is not None)
    if sometimes is not None:
        yield information(CHECK, sometimes)
    if added is not None:
        yield information(CHECK, added)
    elif objectives:
        return
    elif (several := _several_losses(ranks)) is not None:
        yield information(CHECK, several)
    elif summed is None and steps_within_passes(training):
        yield not_judged(CHECK, STEPS_WITHIN_PASSES)
    elif summed is None:
        why = (
            f"the loss{of} is not known: no backward pass started from exactly one of the loss functions of "
            "torch.nn.functional that are followed"
        )
        yield Finding(CHECK, Outcome.SKIPPED, why)


def _without_clipping(objectives: Sequence[StepObjective]) -> Sequence[StepObjective]:
    """Return objectives without factors that differ between steps: they come from clipping, not from the loss."""
    factors = [one.factor for one in objectives]
    is_clipped = all(0 < one < math.inf for one in factors) and spread(factors) > 1 + NEAR
    is_clipped &= spread([one.total for one in objectives]) > 1 + NEAR  # not divided by numbers of tokens
    return [replace(one, factor=1.0) for one in objectives] if is_clipped else objectives


def _several_losses(ranks: Sequence[RecordedRank]) -> str | None:
    noted_passes = [(one, _noted(one)) for rank in ranks for one in passes_of(rank)]
    added = _added(
        [
            [
                (call["function"], None if call["weight"] is None else call["weight"] / one.scale)
                for call in noted.get("calls", ())
            ]
            for one, noted in noted_passes
        ]
    )
    if added is None:
        return None
    if all(is_sum_of_calls(noted) for _, noted in noted_passes):
        return f"The loss of each backward pass is {' + '.join(added)}."
    return f"The loss of each backward pass contains {' and '.join(added)}. Whether it has other terms is not known."


def _added_terms(ranks: Sequence[RecordedRank]) -> str | None:
    """Return a sentence with the terms of the loss if some are not torch loss functions, otherwise None."""
    passes = [(one, _noted(one).get("terms") or ()) for rank in ranks for one in passes_of(rank)]
    if not all(len(terms) > 1 and any(not term["call"] for term in terms) for _, terms in passes):
        return None
    added = _added([[(term["name"], term["factor"] / one.scale) for term in terms] for one, terms in passes])
    return None if added is None else f"The loss of each backward pass is {' + '.join(added)}."


def _added_to_some(ranks: Sequence[RecordedRank]) -> str | None:
    """Return a sentence with the terms that only some backward passes add to their loss functions, otherwise None."""
    passes = [_noted(one).get("terms") or () for rank in ranks for one in passes_of(rank)]
    mixed = [{term["name"] for term in terms if not term["call"]} for terms in passes if len(terms) > 1]
    counts = Counter(name for names in mixed for name in names)
    some = sorted(name for name, count in counts.items() if count < len(passes))
    if not some or not all(any(term["call"] for term in terms) for terms in passes):
        return None
    number = sum(not names.isdisjoint(some) for names in mixed)
    return f"{number} of {len(passes)} backward passes add {listed(some)} to the loss, and the others do not."


def _noted(one: BackwardPass) -> Facts:
    noted: Facts = one.noted("objective")
    return noted


def _added(passes: Sequence[Sequence[tuple[str, float | None]]]) -> list[str] | None:
    """Return each term with its weights; None if passes have different terms, or no weight of a term is known."""
    kinds = {tuple(name for name, _ in terms) for terms in passes}
    if len(kinds) != 1 or not (names := kinds.pop()):
        return None
    told = []
    for index, name in enumerate(names):
        weights = sorted(weight for terms in passes if (weight := terms[index][1]) is not None)
        if not weights:
            return None
        same = abs(weights[-1] - weights[0]) <= EXACT * abs(weights[-1])
        times = _weight(weights[0]) + ("" if same else f" to {_weight(weights[-1])}")
        told.append(name if times == "1" else f"{times} × {name}")
    counts = Counter(told)
    return [one if count == 1 else f"{one} ({count} times)" for one, count in counts.items()]


def _optimised(objectives: Sequence[StepObjective], rank: int | None, of: str, *, is_a_term: bool) -> str:
    """Return a sentence on the loss of all ranks, or of one if it is not known how much that counts in the sum.

    ``is_a_term``: other terms are added to the loss function.
    """
    functions = dict.fromkeys(share.function for one in objectives for share in one.shares)
    loss, its = (f"the loss{of}", "all") if rank is None else (f"rank {rank}'s own loss{of}", "its")
    if is_a_term and len(functions) == 1:
        loss = f"the {next(iter(functions))} in {loss}"
    loss = loss[0].upper() + loss[1:]
    if len(functions) > 1:
        return f"{loss} of a step has separate backward passes with different loss functions: {listed(functions)}."
    if rank is not None:
        objectives = [one if one.is_only_loss else replace(one, factor=1.0) for one in objectives]
    worst = max(objectives, key=lambda one: spread(one.rates))
    if all(abs(one.of_mean - 1) <= NEAR for one in objectives):
        every = f"all {_from_to(amount, [one.terms for one in objectives])} terms of {listed(functions)}"
        return f"The script weights gradients such that they are those of the mean over {every}."
    function, terms = worst.shares[0].function, _from_to(amount, [one.terms for one in objectives])
    is_multiplied = any(abs(one.factor - 1) > NEAR for one in objectives)  # by the script, after the backward passes
    if worst.is_even and not is_multiplied and all(equals(rate, 1.0) for one in objectives for rate in one.rates):
        return f"{loss} is the sum over {its} {terms} terms of {function}."
    times = _times([one.total for one in objectives])
    if worst.is_even:
        return f"{loss} is {times}the mean over {its} {terms} terms of {function}."
    terms = amount(worst.terms)
    if worst.gap is None:
        gap, apart = "The difference between its gradient and that of", "is not known"
    else:
        gap, apart = "Its gradient differs from that of", f"by {in_words(worst.gap, 'share')}"
    return (
        f"{loss} is {times}a weighted mean of {function}{_over(worst)}{_ratio(worst)}. {gap} the mean "
        f"over {its} {terms} terms {apart}."
    )


def _times(totals: Sequence[float]) -> str:
    """Return the factor before a mean in words, "" if it is 1 or unknown."""
    known_totals = sorted(one for one in totals if not math.isnan(one))
    if not known_totals or all(abs(one - 1) <= NEAR for one in known_totals):
        return ""
    total = known_totals[-1]
    if abs(total - known_totals[0]) > NEAR * abs(total):
        return f"{_from_to(_weight, known_totals)} × "
    known = next((words for factor, words in _PARTS.items() if abs(total / factor - 1) <= NEAR), None)
    return known or f"{_weight(total)} × "


def _over(objective: StepObjective) -> str:
    micro, ranks = max(map(len, objective.ranks)), len(objective.ranks)
    over = [f"{micro} micro-batches" if micro > 1 else "", f"{ranks} ranks" if ranks > 1 else ""]
    return f" over {' on each of '.join(filter(None, over))}" if any(over) else ""


def _ratio(objective: StepObjective) -> str:
    if not all(share.is_even for share in objective.shares):
        return ""  # the weights of the terms within a loss are not kept
    ratio = spread(objective.rates)
    return "" if ratio in (1.0, math.inf) else f": a term counts up to {ratio:.3g} × as much as another"


def _from_to(words: Callable[[float], str], numbers: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((words(min(numbers)), words(max(numbers)))))


def _weight(number: float) -> str:
    return f"{number:,.4g}"


def divided_wrongly(objectives: Sequence[StepObjective], of: str) -> Finding | None:
    """Return the failure of a loss that is not divided by the number of micro-batches, or divided twice.

    Only if nothing else explains it: each micro-batch is the next batch of one loader and has one loss, a mean, and
    every loss has exactly that weight on every rank at every step. Two losses that two backward passes add up, as in a
    GAN, do not look like that.
    """
    counts = {len(rank) for one in objectives for rank in one.ranks}
    shares = [share for one in objectives for share in one.shares]
    count = max(counts)
    if not all(abs(one.factor - 1) <= NEAR for one in objectives):
        return None  # gradients are divided, or their norm is changed, after the backward passes
    if len(counts) > 1 or count < 2 or not all(one.batches_differ for one in objectives):
        return None
    if len({(share.function, share.reduction) for share in shares}) > 1 or shares[0].reduction not in _MEANS:
        return None
    if all(equals(share.weight, 1.0) for share in shares):
        return failed_with_hint(
            CHECK,
            f"the gradient{of} is the sum over {count} micro-batches, not their mean",
            f"divide the loss by {count}",
            cause="not-divided-by-micro-batches",
            family="accumulation",
        )
    # With two micro-batches, a quarter may be right: a loss ½ x², divided by 2.
    if count > 2 and all(equals(share.weight, 1 / count**2) and share.is_alone for share in shares):
        return failed_with_hint(
            CHECK,
            f"the loss of each of {count} micro-batches{of} has the weight 1/{count**2} instead of 1/{count}",
            f"divide the loss by {count} only once, either in the script or in its trainer",
            cause="divided-twice",
            family="accumulation",
        )
    return None


def _divided_by_all_so_far(objectives: Sequence[StepObjective], of: str) -> Finding | None:
    """Return the failure of losses that are divided by a number of terms that grows from step to step.

    Between two steps, it grows by the terms of the later step. If the script adds it up over ranks at each step, what
    earlier steps left in it is multiplied by the number of ranks.
    """
    divisors = [one.terms / one.total if one.total > 0 else math.nan for one in objectives]
    for times in {1, len(objectives[0].ranks)}:
        grown = [later - times * before for before, later in pairwise(divisors)]
        pairs = zip(grown, objectives[1:], strict=True)
        if len(grown) > 1 and all(abs(by - one.terms) <= NEAR * one.terms for by, one in pairs):
            counted_so_far = _from_to(amount, divisors[1:])
            return failed_with_hint(
                CHECK,
                f"the loss{of} is divided by the number of terms of all steps so far: by {counted_so_far} in steps "
                f"with {_from_to(amount, [one.terms for one in objectives[1:]])}",
                "set the number of tokens or samples back to zero after each step",
                cause="count-never-reset",
                family="loss-normalisation",
            )
    return None


def _short_windows(objectives: Sequence[StepObjective]) -> HeadlineNote | None:
    """Return a note on steps over fewer micro-batches whose mean losses have a different total weight than others."""
    if any(share.reduction not in _MEANS for one in objectives for share in one.shares):
        return None
    totals: dict[int, list[float]] = {}
    for one in objectives:
        counts = {len(rank) for rank in one.ranks}
        if len(counts) > 1 or math.isnan(one.total):
            return None
        totals.setdefault(counts.pop(), []).append(one.total)
    if len(totals) < 2:
        return None
    if not all(map(_are_alike, totals.values())) or _are_alike([own[0] for own in totals.values()]):
        return None
    fewest, most = min(totals), max(totals)
    less, whole = totals[fewest][0], totals[most][0]
    return headline_note(
        CHECK,
        f"The losses of a step over {counted(fewest, 'micro-batch', 'micro-batches')} have a total weight of "
        f"{_weight(less)}; those of a step over {most} have {_weight(whole)}. If each step should take a mean, divide "
        "each loss by the number of micro-batches in its step.",
    )


def _counted_by_ranks(objectives: Sequence[StepObjective]) -> HeadlineNote | None:
    """Return a note if each loss is a mean over its own batch, multiplied by the number of ranks.

    Some trainers multiply losses by it, because they expect sums that are divided by the tokens of all ranks.
    """
    shares = [share for one in objectives for share in one.shares]
    ranks = max((len(one.ranks) for one in objectives), default=1)
    if ranks == 1 or not all(one.batches_differ and abs(one.factor - 1) <= NEAR for one in objectives):
        return None
    if not all(share.reduction in _MEANS and equals(share.weight, ranks) for share in shares):
        return None
    micro = max(len(rank) for one in objectives for rank in one.ranks)
    added, divide = (
        (f", and the {micro} micro-batches are added up", f", and divide by {micro}") if micro > 1 else ("", "")
    )
    return headline_note(
        CHECK,
        f"Each loss is a mean, multiplied by the number of ranks{added}: the gradient is {ranks * micro} × that of the "
        f"mean over all of them. If this is not intended, do not multiply means{divide}.",
    )


def _averaged_again(ranks: Sequence[RecordedRank], objectives: Sequence[StepObjective]) -> HeadlineNote | None:
    """Return a note if a loss is divided by the terms of all ranks, and its gradients are averaged over ranks as well.

    At each step, its weights on all ranks then add up to 1. They differ, or the script adds up the loss itself over
    ranks, which autograd does not record; otherwise the divisor may come from elsewhere, such as the half in ½ x².
    """
    every = list(steps_together(ranks))
    if not every or not all(abs(factor_of(steps) - 1) <= NEAR for steps in every):
        return None
    is_one_loss = len(objectives) == len(every)
    is_added_up = is_one_loss and any(rank.noted("gathered-outputs").get("reduced_number") for rank in ranks)
    if is_one_loss:
        weights = [[[sum(share.weight for share in own) for own in one.ranks]] for one in objectives]
    else:
        by_rank = [[_weights_of_calls(step) for step in steps] for steps in every]
        if len({len(own) for steps in by_rank for own in steps}) > 1:
            return None
        weights = [list(map(list, zip(*steps, strict=True))) for steps in by_rank]
    for steps in zip(*weights, strict=True):
        count = len(steps[0])
        if count == 1 or not all(equals(sum(own), 1.0) for own in steps):
            continue
        if is_added_up:
            return headline_note(
                CHECK,
                f"The script adds up the loss over ranks with torch.distributed.all_reduce and divides it by {count} "
                "before the backward pass. Autograd records only the division, and gradients are averaged over ranks, "
                f"too: this is 1/{count} of the mean over all terms. Reduce a detached copy of the loss, or divide it "
                "only after the backward pass.",
            )
        if sum(max(own) - min(own) > NEAR for own in steps) > 1:
            return headline_note(
                CHECK,
                f"The weights of a loss on {count} ranks add up to 1, as if it were divided by the number of terms of "
                f"all ranks, but gradients are averaged over ranks, too: this is 1/{count} of the mean over all terms. "
                f"If it is not intended, multiply the loss by {count}.",
            )
    return None


def _weights_of_calls(step: RecordedStep) -> list[float]:
    """Return the weight of each loss call, added up over a step's passes; nothing if these differ, or it is unknown."""
    passes = [[(call["weight"], one.scale) for call in _noted(one).get("calls", ())] for one in loss_passes(step)]
    if step.other_passes or len({*map(len, passes)}) != 1 or any(weight is None for own in passes for weight, _ in own):
        return []
    return [sum(weight / scale for weight, scale in own) for own in zip(*passes, strict=True)]


def _are_alike(totals: Sequence[float]) -> bool:
    return max(totals) - min(totals) <= NEAR * max(map(abs, totals))


def summed_micro_batches(ranks: Sequence[RecordedRank], of: str) -> HeadlineNote | None:
    """Return a note if each step adds up the mean losses of its micro-batches, however they are computed."""
    steps = list(steps_together(ranks))
    counts = {len(loss_passes(step)) for own in steps for step in own}
    if len(counts) != 1 or (count := counts.pop()) < 2:
        return None
    sizes = {one["loader"]: one["batch_size"] for rank in ranks for one in rank.noted("loaders").get("loaders", ())}
    for own in steps:
        if not abs(factor_of(own) - 1) <= NEAR:
            return None
        for step in own:
            if step.other_passes or not all(_is_mean(one, count) for one in loss_passes(step)):
                return None
            if not (have_own_batches(step) or _have_own_rows(step, sizes)):
                return None
    return headline_note(
        CHECK,
        f"The gradient{of} is the sum over {count} micro-batches, not their mean. Divide the loss by {count} if a mean "
        "is intended.",
    )


def _is_mean(one: BackwardPass, count: int) -> bool:
    """Return whether a pass differentiates a mean, or a sum of means, that is not divided by ``count``."""
    noted = one.noted("objective")
    calls, means = noted.get("calls", ()), noted.get("means", ())
    if len(calls) == 1 and calls[0]["weight"] is not None:
        means = [[calls[0]["weight"]]]
    return bool(means) and all(
        any(equals(weight / one.scale, 1.0) for weight in weights)
        and not any(equals(weight / one.scale, 1 / count) for weight in weights)
        for weights in means
    )


def _have_own_rows(step: RecordedStep, sizes: dict[int, int | None]) -> bool:
    """Return whether each pass follows one forward of one module, with different rows: parts of one batch, if known.

    Different rows may be views of the same ones. Each view has as many rows as the batch, and each part has fewer.
    """
    forwards = forwards_by_pass(step)
    if any(len(own) != 1 or "order" not in own[0] for own in forwards):
        return False
    made = [own[0] for own in forwards]
    if len({one["module"] for one in made}) > 1 or len({one["order"] for one in made}) < len(made):
        return False
    batches = [one["fetched"] for one in made]
    if not any(batches):
        return len({one["rows"] for one in made[:-1]}) == 1 and made[-1]["rows"] <= made[0]["rows"]
    size = sizes.get(batches[0]["loader"]) if batches[0] else None
    return size is not None and all(one == batches[0] for one in batches) and sum(o["rows"] for o in made) <= size
