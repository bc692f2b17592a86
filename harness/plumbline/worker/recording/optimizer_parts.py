"""Several optimizers, each with its own part of the model, make one step: at once, or in turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from plumbline.evidence.trace import MicroBatch, Step, Tensors


@dataclass(frozen=True)
class OptimizerPart:
    """What one optimizer did: ``names`` are its parameters', ``step`` is the step as if there were no other.

    ``step`` has micro-batches where a pass was made for this optimizer.
    """

    optimizer: int
    names: tuple[str, ...]
    step: Step


def belongs(part: OptimizerPart, to: Sequence[OptimizerPart]) -> bool:
    """Return whether a part belongs to the step begun by others: parameters of its own, and no samples but theirs.

    One optimizer that is given one group of its parameters after the other makes one step of them too.
    """
    if not to or any(set(part.names) & set(other.names) for other in to):
        return False
    if any(part.optimizer == other.optimizer for other in to) and not part.names:
        return False
    own, first = part.step.micro_batches, to[0].step.micro_batches
    return not own or _samples(own) == _samples(first) or bool(_alternating(first, own))


def joined(parts: Sequence[OptimizerPart]) -> Step:
    """Return all parts as one step, with the parameter groups in the model's order, whichever stepped first.

    Samples count once, also where there was a pass for each part before any of them stepped.
    """
    first, last = parts[0].step, parts[-1].step
    place = {name: number for number, name in enumerate(first.before)}
    in_order = sorted(parts, key=lambda part: min((place[name] for name in part.names), default=len(place)))
    turns: list[tuple[str, ...]] = []
    for part in parts:
        if turns and not part.step.micro_batches:
            turns[-1] += part.names
        else:
            turns.append(part.names)
    alternating = _alternating(first.micro_batches, last.micro_batches)
    skipped = all(part.step.skipped for part in parts)
    return replace(
        first,
        micro_batches=alternating or _once(first.micro_batches, len(parts)),
        alternate=bool(alternating),
        gradients=_gradients(part for part in in_order if part.step.skipped == skipped),
        after=last.after,
        learning_rates=tuple(rate for part in in_order for rate in part.step.learning_rates),
        skipped=skipped,
        turns=tuple(turns) if len(turns) > 1 else (),
        held_back=_gradients(part for part in in_order if part.step.skipped != skipped),
    )


def _gradients(parts: Iterable[OptimizerPart]) -> Tensors:
    return {name: value for part in parts for name, value in part.step.gradients.items()}


def _alternating(first: tuple[MicroBatch, ...], later: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of a window in which each has a pass for every optimizer; none where it is another.

    The optimizer that steps ``first`` has seen all passes but those of the others over the last micro-batch.
    """
    size = len(later)
    if not size or len(first) <= size or len(first) % size:
        return ()
    runs = [first[start : start + size] for start in range(0, len(first), size)]
    *earlier, last = map(_samples, runs)
    times = next((place for place, run in enumerate(earlier) if run != earlier[0]), len(earlier))
    complete = len(earlier) % times == 0 and all(
        run == earlier[place - place % times] for place, run in enumerate(earlier)
    )
    if times < 2 or not complete or last != _samples(later):
        return ()
    return tuple(micro for run in (*runs[:-1:times], runs[-1]) for micro in run)


def _once(micro_batches: tuple[MicroBatch, ...], times: int) -> tuple[MicroBatch, ...]:
    size, rest = divmod(len(micro_batches), times)
    runs = [micro_batches[start : start + size] for start in range(0, size * times, max(size, 1))]
    repeated = runs and not rest and all(_samples(run) == _samples(runs[0]) for run in runs)
    return runs[0] if repeated else micro_batches


def _samples(micro_batches: Sequence[MicroBatch]) -> list[tuple[object, ...]]:
    return [(micro.forwards, micro.loss) for micro in micro_batches]
