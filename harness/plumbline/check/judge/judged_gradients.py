"""Which received gradients can be judged, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from plumbline.check.evidence.training import RecordedStep, RecordedTraining
from plumbline.check.judge.clipped_masters import before_clipping
from plumbline.check.judge.rank_weights import forward_communicates, model_parts, shared_part, weights_at
from plumbline.check.judge.received_gradient import ReceivedGradient
from plumbline.check.judge.replayed_updates import OBSERVER as UPDATE
from plumbline.check.judge.replayed_updates import steps_with_own_gradients
from plumbline.check.judge.step_objective import equals, objective_of
from plumbline.evidence.training_record import StepOfRanks
from plumbline.judge.mistakes.synchronisation import only
from plumbline.judge.truth import RIGHT, Combination
from plumbline.replay.reasons import FLAT_PARTS

NOT_FINITE = "gradients were not finite"
NOT_FOLLOWED = (
    "no backward pass reached the optimizer's parameters, and they are not copies of the model's weights; gradients "
    "cannot be followed if the script computes them with torch.func or compiled autograd, or with torch.autograd.grad "
    "in compiled code or for only some of an optimizer's parameters"
)
NOT_TOGETHER = "the ranks' forwards could not be recomputed together"
DISTRIBUTED = f"the parameters and their gradients are DTensors, and {NOT_TOGETHER}"
IN_PARTS = f"each rank holds a part of the model, and {NOT_TOGETHER}"
OWN_VALUES = (
    "no module holds it, and each rank begins with its own values and trains them with its own gradients; whether the "
    "ranks should share it is not known"
)
ALIKE_PARTS = f"the forward communicates, all ranks compute the same gradients, and {NOT_TOGETHER}"
ZERO = "every gradient was zero in the recorded steps, so no difference could show"
REDUCED_IN_STEP = (
    "the optimizer's step communicates. Each rank steps with its own gradients, but all ranks hold the same weights "
    "afterwards; whether the step averages gradients is not known"
)
STEPPED_ALONE = (
    "each rank steps other parameters of the model, with its own gradients, and does not get the updates of other ranks"
)
REASONS = (
    REDUCED_IN_STEP, STEPPED_ALONE, DISTRIBUTED, FLAT_PARTS, ALIKE_PARTS, IN_PARTS, OWN_VALUES, NOT_FINITE, ZERO,
    NOT_FOLLOWED,
)  # fmt: skip
"""Why gradients cannot be judged; of several reasons, the first one is told."""


_Received = tuple[ReceivedGradient, StepOfRanks[RecordedStep]]


@dataclass(frozen=True, eq=False)
class JudgedGradients:
    """Received gradients that can be judged, and the others by the reason why they cannot."""

    judged: list[ReceivedGradient]
    unjudged: Mapping[str, list[ReceivedGradient]]

    @property
    def cases(self) -> list[ReceivedGradient]:
        return self.judged + [case for cases in self.unjudged.values() for case in cases]

    @property
    def with_fewer_passes(self) -> bool:
        """Whether passes before the script changed the weights do not count."""
        return any(case.step.left_out for case in self.judged)

    @property
    def at_several_weights(self) -> bool:
        """Whether all passes of a step count, although the script changed the weights between them."""
        return any(case.step.weights_move_between_passes and not case.step.left_out for case in self.judged)

    @property
    def with_discarded_passes(self) -> bool:
        """Whether the script discarded gradients on purpose, at other steps than the first."""
        return any(case.step.discarded and case.step.number for case in self.judged)

    @property
    def with_gradients_of_other_steps(self) -> list[str]:
        """Names of parameters whose gradients include backward passes that belong to another optimizer's step."""
        names: dict[str, None] = {}
        for case in self.judged:
            counted = set(map(id, case.step.passes))
            for one in case.step.other_passes:
                if id(one) in counted:
                    arrived = zip(case.parameters, case.step.norms(one.local), strict=True)
                    names |= dict.fromkeys(parameter.name for parameter, norm in arrived if norm)
        return [*names]


@lru_cache(maxsize=1)
def judged_gradients(training: RecordedTraining) -> JudgedGradients:
    """Return every rank's gradient of each step that was taken and that all ranks recorded."""
    judged: list[ReceivedGradient] = []
    unjudged: dict[str, list[ReceivedGradient]] = {}
    communicates = forward_communicates(training)
    cases = list(_received_gradients(training))
    for received, (_, recorded) in zip(before_clipping([case for case, _ in cases]), cases, strict=True):
        case = with_other_passes(_with_last_weights(received))
        why = _why_unjudged(case, recorded)
        if not why and communicates and _is_alike_on_all_ranks(case):
            why = ALIKE_PARTS
        if why:
            unjudged.setdefault(why, []).append(case)
        else:
            judged.append(case)
    return JudgedGradients(judged, unjudged)


def _with_last_weights(case: ReceivedGradient) -> ReceivedGradient:
    """Return the case without passes at weights that the script changed before the last pass, if they do not count.

    Sharpness-aware minimisation keeps only the gradients at the changed weights. Adversarial training may also keep
    those of the first pass, but not those in between. Both compute the gradients of one batch again. If the other
    passes have batches of their own, their gradients may be lost by mistake.
    """
    if not case.step.weights_move_between_passes or case.fit(RIGHT).holds:
        return case
    own = Combination(only({case.rank}, case.world))
    for with_first in (False, True):
        ranks = {rank: step.at_last_weights(with_first=with_first) for rank, step in case.ranks.items()}
        fewer = replace(case, ranks=ranks)
        if fewer.fit(RIGHT).holds:
            return fewer if all(map(_have_same_batches, case.ranks.values(), ranks.values())) else case
        if fewer.fit(own).holds:
            return fewer
    return case


def _have_same_batches(step: RecordedStep, fewer: RecordedStep) -> bool:
    """Return whether all batches of a step are those of its last passes. Passes after one forward have one batch."""
    every, last = (
        {own[0].get("order") for one in each.passes if (own := one.noted("batches").get("forwards"))}
        for each in (step, fewer)
    )
    return every <= last and None not in last


def with_other_passes(case: ReceivedGradient) -> ReceivedGradient:
    """Return the case with the backward passes of other optimizers' steps as its own, if it is right only with them.

    These passes left gradients in the same parameters, and nothing zeroed them. Two optimizers may step at different
    frequencies.
    """
    if not any(step.other_passes for step in case.ranks.values()) or case.fit(RIGHT).holds:
        return case
    ranks = {rank: replace(step, passes=step.other_passes + step.passes) for rank, step in case.ranks.items()}
    whole = replace(case, ranks=ranks)
    return whole if whole.fit(RIGHT).holds else case


def received_gradients(training: RecordedTraining) -> list[ReceivedGradient]:
    return [case for case, _ in _received_gradients(training)]


def _received_gradients(training: RecordedTraining) -> list[_Received]:
    """Return every received gradient, with the steps of all ranks.

    The format to which a communication hook rounds gradients is known from the hook's name, or else from the gradients:
    it is the finest one in which they are right up to a factor. A script may also reduce them itself in 16 bits.
    """
    hooks = [name for rank in training.ranks for name in rank.noted("precision").get("hooks", ())]
    formats = _formats(hooks) if hooks else ("", *_reduced_formats(training))
    found = (list(_received_through(training, one)) for one in formats)
    first = next(found)
    if len(formats) == 1:
        return first
    return next((cases for cases in (first, *found) if all(map(_is_a_multiple, cases))), first)


def _is_a_multiple(received: _Received) -> bool:
    case = replace(received[0], free_factor=True)
    return not case.is_finite or case.fit(RIGHT).holds


def _received_through(training: RecordedTraining, hook_format: str) -> Iterator[_Received]:
    previous: dict[tuple[int, int], ReceivedGradient] = {}
    measured: dict[tuple[int, int], ReceivedGradient] = {}
    held_in_parts = model_parts(training)
    windows, divisor = _windows(training), requested_divisor(training)
    for index, recorded in enumerate(training.common_steps):
        if not recorded.is_one:
            return
        shared = shared_part(recorded)
        optimizer = shared.optimizer
        parts = frozenset(name for number, name in held_in_parts if number == optimizer)
        for rank in shared:
            ranks = _of_what_it_holds(rank, shared)
            step = ranks[rank]
            before, recomputed = (
                one if (one := known.get((rank, optimizer))) and one.parameters == step.parameters else None
                for known in (previous, measured)
            )
            case = ReceivedGradient(
                index,
                rank,
                ranks,
                before,
                windows[optimizer],
                hook_format=hook_format,
                parts=parts,
                divisor=divisor,
                measured=recomputed,
            )
            previous[rank, optimizer] = replace(case, previous=None)
            if case.exact(RIGHT) is not None:
                measured[rank, optimizer] = replace(case, previous=None, measured=None)
            if not step.skipped and step.parameters:
                yield case, recorded


def _of_what_it_holds(rank: int, steps: Mapping[int, RecordedStep]) -> Mapping[int, RecordedStep]:
    """Return the steps of all ranks, restricted to the parameters, or pieces of them, that one rank updates."""
    own = steps[rank].parameters
    numbers = [number for number, one in enumerate(own) if one.is_held]
    return steps if len(numbers) == len(own) else {other: step.only(numbers) for other, step in steps.items()}


def _windows(training: RecordedTraining) -> Mapping[int, int]:
    windows: dict[int, int] = {}
    for step in training.steps:
        windows[step.optimizer] = max(windows.get(step.optimizer, 1), len(step.passes))
    return windows


def requested_divisor(training: RecordedTraining) -> float | None:
    """Return the number by which the script makes FSDP2 divide gradient sums over ranks, None if FSDP2 chooses it."""
    modules = [one for rank in training.ranks for one in rank.noted("parallelism").get("modules", ())]
    divisors = {divisor for module in modules for divisor in module.get("divisors", ())}
    return divisors.pop() * training.world_size if len(divisors) == 1 else None


def _formats(hooks: Sequence[str]) -> Sequence[str]:
    """Return the formats to which communication hooks with these names may round gradients, "" for none.

    Rounding to bfloat16 would also explain changes of several percent, so only a name can tell that.
    """
    for part, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if any(part in hook for hook in hooks):
            return (name,)
    return ("", "float16")


def _reduced_formats(training: RecordedTraining) -> list[str]:
    """Return the 16-bit formats in which the script itself reduces at least as many entries as the gradients have."""
    facts = [step.noted("parallelism") for step in training.steps]
    return [
        dtype
        for dtype in ("float16", "bfloat16")
        if any(0 < one.get("entries", 0) <= one.get("formats", {}).get(dtype, 0) for one in facts)
    ]


def _why_unjudged(case: ReceivedGradient, recorded: StepOfRanks[RecordedStep]) -> str:
    if not case.is_finite:
        return NOT_FINITE
    if not case.compared.any():
        return _why_nothing_arrived(case)
    if not case.fit(RIGHT).holds and _is_reduced_in_step(recorded):
        return REDUCED_IN_STEP
    own = Combination(only({case.rank}, case.world))
    divided = [step.is_divided for step in recorded.values()]
    are_apart = any(divided) and (not all(divided) or bool(differ_when_divided(recorded)))
    if are_apart and case.fit(own).holds:
        return STEPPED_ALONE
    return ""


def differ_when_divided(steps: StepOfRanks[RecordedStep]) -> list[str]:
    """Return the parameters that ranks divide among their optimizers, but hold with different values before a step."""
    if not all(step.is_divided for step in steps.values()):
        return []
    names = [one.name for one in steps.first.parameters]
    digests = zip(*(step.facts["masters"]["divided"] for step in steps.values()), strict=True)
    return [name for name, own in zip(names, digests, strict=True) if len({*own}) > 1]


def _is_alike_on_all_ranks(case: ReceivedGradient) -> bool:
    """Return whether all ranks compute the same gradients, bit for bit, so that a reduction over them is invisible."""
    own = [case.value(Combination(only({rank}))) for rank in case.ranks]
    return case.world > 1 and all(not bool((case.norms(one - own[0]) * case.compared).any()) for one in own)


def _why_nothing_arrived(case: ReceivedGradient) -> str:
    if case.is_zero:
        return ZERO
    if any(one.facts.get("distributed") for step in case.ranks.values() for one in step.passes):
        return DISTRIBUTED
    if any(one.facts.get("in_flat_parts") for step in case.ranks.values() for one in step.passes):
        return FLAT_PARTS
    if not case.parts:
        return NOT_FOLLOWED
    return IN_PARTS if any(one.named for one in case.parameters) else OWN_VALUES


def _is_reduced_in_step(steps: StepOfRanks[RecordedStep]) -> bool:
    """Return whether ranks step with different gradients, but communicate and end up with the same weights."""
    if not all(step.noted("parallelism").get("collectives") for step in steps.values()):
        return False
    if all(steps_with_own_gradients(step.noted(UPDATE)) for step in steps.values()):
        return False
    weights = list(weights_at(steps))
    return any(one.differ("gradients") for one in weights) and not any(
        one.differ("after") and not one.is_rounding for one in weights
    )


def without_other_models(training: RecordedTraining) -> RecordedTraining:
    """Return a training whose steps lack the backward passes that no parameter of their optimizer has part in.

    Such a pass left no gradient, not even zeros, in the optimizer's parameters on any rank.
    """
    needed = {
        (step.optimizer, step.number, index)
        for step in training.steps
        for index, one in enumerate(step.passes)
        if step.optimizer not in one.facts.get("not_for", ())
    }

    def own(step: RecordedStep) -> RecordedStep:
        passes = [one for index, one in enumerate(step.passes) if (step.optimizer, step.number, index) in needed]
        return replace(step, passes=tuple(passes)) if passes else step

    ranks = [replace(rank, steps=tuple(map(own, rank.steps))) for rank in training.ranks]
    return replace(training, ranks=tuple(ranks))


def without_discarded_passes(training: RecordedTraining) -> RecordedTraining:
    """Return a training without the backward passes whose gradients the script discards on purpose.

    ``zero_grad()`` in the wrong place discards gradients at every step. Passes therefore count as discarded on purpose
    only if the step's gradient is right without them and wrong with them, and one of these holds:

    - At least half of the optimizer's steps have no such passes, and the loss is not divided by the number of all
      passes. Trials before the first step are an example, and passes that estimate curvature every few steps.
    - They compute first-order gradients of inputs, as for adversarial examples.
    - All are calls of ``torch.autograd.grad``, which accumulates nothing, and losses are not divided by their number.
    """
    for place in range(min((len(rank.steps) for rank in training.ranks), default=0)):
        tried = [_with_passes(training, place, kept) for kept in _kept_passes(training, place)]
        if tried and not _is_right_at(training, place):
            fewer = next((one for one in tried if _is_right_at(one, place)), training)
            training = training if _divides_by_all_passes(training, fewer, place) else fewer
    return training


def _kept_passes(training: RecordedTraining, place: int) -> Iterator[Sequence[int]]:
    """Yield the indices of the passes that may be those that count in a step, if the others were discarded."""
    steps = [rank.steps[place] for rank in training.ranks]
    first = steps[0]
    count = len(first.passes)
    if any((one.optimizer, one.number, len(one.passes)) != (first.optimizer, first.number, count) for one in steps):
        return
    if all(map(are_by_grad, steps)):
        yield from (range(begin, end) for end in range(count, 0, -1) for begin in range(end) if end - begin < count)
        return
    counts = [len(step.passes) for step in training.ranks[0].steps if step.optimizer == first.optimizer]
    usual = {sorted(counts)[(len(counts) - 1) // 2]} if len(counts) > 1 else set()
    usual |= {max(counts[1:])} if not first.number and counts[1:] else set()
    yield from (range(count - most, count) for most in sorted(usual, reverse=True) if 0 < most < count)
    others = [
        index for index in range(count - 1) if not all(one.passes[index].facts.get("for_inputs") for one in steps)
    ]
    if count and len(others) < count - 1:
        yield [*others, count - 1]


def are_by_grad(step: RecordedStep) -> bool:
    """Return whether the gradients of a step are results of ``torch.autograd.grad``."""
    return bool(step.passes) and all(one.facts.get("by_grad") for one in step.passes)


def _divides_by_all_passes(training: RecordedTraining, fewer: RecordedTraining, place: int) -> bool:
    """Return whether the losses of a step weigh less than those of another one by the share of passes left out."""
    step = training.ranks[0].steps[place]
    left = len(fewer.ranks[0].steps[place].passes)
    own = objective_of(list(fewer.at(place).values()), written=True)
    others = (
        objective_of(list(training.at(other).values()), written=True)
        for other, one in enumerate(training.ranks[0].steps)
        if one.optimizer == step.optimizer and len(one.passes) == left
    )
    known = [one.of_losses for one in others if one is not None]
    known += [1.0] if are_by_grad(step) else []
    return own is not None and any(equals(own.of_losses * len(step.passes) / left, one) for one in known)


def _with_passes(training: RecordedTraining, place: int, kept: Sequence[int]) -> RecordedTraining:
    """Return the training with only these backward passes in the step with index ``place`` of each rank."""
    ranks = []
    for rank in training.ranks:
        step = rank.steps[place]
        passes = tuple(step.passes[index] for index in kept)
        fewer = replace(step, passes=passes, discarded=len(step.passes) - len(passes))
        ranks.append(replace(rank, steps=(*rank.steps[:place], fewer, *rank.steps[place + 1 :])))
    return replace(training, ranks=tuple(ranks))


def _is_right_at(training: RecordedTraining, place: int) -> bool:
    cases = [one for one in received_gradients(training) if one.index == place]
    return bool(cases) and all(bool(one.compared.any()) and _is_right_or_simple(one) for one in cases)


def _is_right_or_simple(case: ReceivedGradient) -> bool:
    """Return whether a gradient is right, or a multiple or a rank's share of it that torch.autograd.grad computed."""
    if case.fit(RIGHT).holds:
        return True
    if not are_by_grad(case.step):
        return False
    own = Combination(only({case.rank}, case.world))
    return case.fit_of_a_multiple().holds or case.fit(own).holds
