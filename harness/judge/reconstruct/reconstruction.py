"""The way along the sketches: weights before a step, gradients, weights after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.core.cell import Cell
from harness.core.training_behavior import ORDINARY, TrainingBehavior
from harness.evidence.trace import RankTrace, Sketch, Step, Tensors, Trace
from harness.judge.oracle.noise import norm
from harness.judge.oracle.oracle import clipped, mean_gradient
from harness.judge.reconstruct.agreement import agreed
from harness.judge.reconstruct.known_tensors import KnownTensors
from harness.judge.reconstruct.optimizer_replay import Replay
from harness.judge.reconstruct.search import Search
from harness.judge.reconstruct.step_context import LIMIT, ExpectedStep, StepContext, rounding_sizes
from harness.workloads import Workload


def whole_trace(trace: Trace, workload: Workload, cell: Cell, behavior: TrainingBehavior = ORDINARY) -> Trace:
    """Return a trace with a whole tensor in the place of every sketch; the same trace where there is none."""
    if not trace.is_sketched:
        return trace
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        known = KnownTensors()
        whole = _Reconstruction(trace.ranks, workload, cell, behavior, known).trace(trace)
        if trace.saved is None:
            return whole
        # A training that is interrupted goes on from what was left: the same bits are the same tensors in all three.
        saving = cell.resized if workload.elastic else cell
        begun = _Reconstruction(trace.saved.ranks, workload, saving, behavior, known)
        saved, resumed = begun.trace(trace.saved), trace.resumed
        if resumed is not None:
            resumed = _Reconstruction(resumed.ranks, workload, cell, behavior, known, saved.ranks).trace(resumed)
        return replace(whole, saved=saved, resumed=resumed)


class _Reconstruction:
    """Goes from step to step, all ranks side by side.

    ``steps`` is what was found of each rank's, ``rounding`` how large one rounding of each entry of the present
    gradients is. ``origins`` are the ranks of the launch from which this one goes on; none where it begins with the
    job's weights.
    """

    def __init__(
        self,
        recorded: Sequence[RankTrace],
        workload: Workload,
        cell: Cell,
        behavior: TrainingBehavior,
        known: KnownTensors,
        origins: Sequence[RankTrace] = (),
    ) -> None:
        self.recorded = recorded
        self.workload = workload
        self.context = StepContext(workload, cell, behavior)
        self.known = known
        self.rounding: Tensors = {}
        # Where others resume than were interrupted, the first of those stands for all.
        same_number = len(origins) == len(recorded)
        self.origins = [origins[place if same_number else 0] for place in range(len(recorded))] if origins else []
        self.steps: list[list[Step]] = [[] for _ in recorded]
        self.duplicates = [self._duplicate_of(place) for place in range(len(recorded))]
        self.replays = {
            place: Replay(workload, cell, self.origins[place].steps if self.origins else ())
            for place, duplicate in enumerate(self.duplicates)
            if duplicate is None
        }

    def trace(self, recorded: Trace) -> Trace:
        """Return the launch that was recorded, with whole tensors."""
        for index in range(max((len(rank.steps) for rank in self.recorded), default=0)):
            self._reconstruct_step(index)
        ranks = [
            replace(rank, steps=tuple(self.steps[place]), final=self._final(place))
            for place, rank in enumerate(self.recorded)
        ]
        return replace(recorded, ranks=tuple(ranks))

    def _reconstruct_step(self, index: int) -> None:
        given = {place: rank.steps[index] for place, rank in enumerate(self.recorded) if index < len(rank.steps)}
        steps = {
            place: replace(step, before=self._provisional(place, index), gradients={}, after={})
            for place, step in given.items()
        }
        # Optimizers that take turns each have a gradient at the weights that those before them left.
        for names in next(iter(given.values())).turns[:-1]:
            self._find_gradients(index, given, steps, names)
            self._find_weights(index, given, steps, names)
        self._find_gradients(index, given, steps, ())
        self._find_weights(index, given, steps, ())
        self.context.settle(index, list(steps.values()))
        for place, step in steps.items():
            self.steps[place].append(step)

    def _find_gradients(
        self, index: int, given: Mapping[int, Step], steps: dict[int, Step], names: Collection[str]
    ) -> None:
        """Find the gradients of every rank, those of ``names`` only if there are any."""
        wanted = {place: _only(step.gradients, names) for place, step in given.items()}
        right = self.context.enter(index, list(steps.values()), {name for own in wanted.values() for name in own})
        self.rounding = right.roundings if right else {}
        searches = {place: self._search(place, index, steps[place], right, own) for place, own in wanted.items()}
        # Mistakes are predicted from what is known of all ranks' gradients so far.
        ideas = [replace(step, gradients=searches[place].ideas()) for place, step in steps.items()]
        self.context.settle(index, ideas)
        for number, (place, search) in enumerate(searches.items()):
            if right is not None and search.doubtful():
                search.offer(self.context.predictions(index, number))
                if search.open(LIMIT):
                    search.mix(self.context.each_sample(index))
            found = self.known.found(wanted[place], search, _gradient_sizes(search, right))
            steps[place] = replace(steps[place], gradients={**steps[place].gradients, **found})

    def _find_weights(
        self, index: int, given: Mapping[int, Step], steps: dict[int, Step], names: Collection[str]
    ) -> None:
        """Find the weights of every rank after its optimizer has stepped, those of ``names`` only if there are any."""
        done: list[Step] = []
        for place, step in steps.items():
            duplicate = self.duplicates[place]
            if duplicate is not None:
                other = steps[duplicate]
                step = replace(step, before=other.before, gradients=other.gradients, after=other.after)
            else:
                if not names:
                    step = replace(step, before=self._before(place, index, done))
                step = self._stepped(place, step, given[place], names)
            steps[place] = step
            done.append(step)

    def _provisional(self, place: int, index: int) -> Tensors:
        """Return the weights before a step as far as they can be told before any rank has taken it."""
        left = self._left(place, index)
        return self._apart(place, index, self.recorded[place].steps[index].before)[0].ideas() if left is None else left

    def _before(self, place: int, index: int, done: Sequence[Step]) -> Tensors:
        """Return the weights before a step that other ranks have ``done`` already."""
        left = self._left(place, index)
        return self._settled(place, index, self.recorded[place].steps[index].before, done) if left is None else left

    def _final(self, place: int) -> Tensors | None:
        recorded, steps = self.recorded[place], self.steps[place]
        if recorded.final is None:
            return None
        if steps and recorded.final is recorded.steps[-1].after:
            return steps[-1].after
        return self._settled(place, len(steps), recorded.final)

    def _left(self, place: int, index: int) -> Tensors | None:
        """Return the weights that the step before has left, if they are those before this one."""
        recorded = self.recorded[place].steps
        continues = index > 0 and recorded[index].before is recorded[index - 1].after
        return self.steps[place][index - 1].after if continues else None

    def _apart(self, place: int, index: int, recorded: Tensors, done: Sequence[Step] = ()) -> tuple[Search, Tensors]:
        """Look for weights that no step of this rank has left: at the start, or changed between steps."""
        ideas = [self.context.analysis.start]
        if self.origins and not index:
            left = [(rank.final, *(step.after for step in rank.steps[-1:])) for rank in self.origins]
            ideas = [weights for rank in left for weights in rank if weights is not None] + ideas
        if index:
            own = self.steps[place][index - 1]
            others = [steps[index - 1].after for steps in self.steps if len(steps) >= index]
            ideas = [own.after, *(other for other in others if other is not own.after), own.before]
        # Ranks that share their memory are moved by those that have taken this step already.
        ideas += [part for step in done for part in (step.after, step.before)]
        sizes = {name: rounding_sizes(value, value) for name, value in ideas[0].items()}
        search = self.known.search(recorded, {name: norm(value) for name, value in sizes.items()})
        search.offer(ideas)
        search.mix(ideas)
        search.mix_each(ideas)
        return search, sizes

    def _settled(self, place: int, index: int, recorded: Tensors, done: Sequence[Step] = ()) -> Tensors:
        search, sizes = self._apart(place, index, recorded, done)
        return self.known.found(recorded, search, sizes)

    def _search(self, place: int, index: int, step: Step, right: ExpectedStep | None, recorded: Tensors) -> Search:
        """Look for gradients among what is right, and among mixtures of what was there."""
        if right is None:
            return self.known.search(recorded, {})
        search = self.known.search(recorded, right.rounding, right.lengths)
        computed = clipped(mean_gradient(right.computed), self.workload.clip_norm)
        search.try_all(right.thawed | computed, right.thawed | right.truth.contract)
        search.offer(right.truth.one_device)
        # A small factor shows in all tensors together long before it shows in one.
        search.scale(computed)
        if search.doubtful():
            earlier = [self.steps[place][index - 1].gradients] if index else []
            parts = [part for groups in right.mixed for part in groups]
            before = [part for groups in self.context.parts(index - 1) for part in groups]
            search.offer([mean_gradient(right.mixed), *earlier])
            search.mix([part for groups in right.computed for part in groups])
            search.mix(parts)
            search.mix([*parts, *earlier, *before, step.before])
            search.mix_each([*parts, *earlier])
        return search

    def _stepped(self, place: int, step: Step, recorded: Step, names: Collection[str]) -> Step:
        """Return the step with the weights after it, those of ``names`` only if there are any."""
        replay = self.replays[place]
        wanted = _only(recorded.after, names)
        made: Tensors = {}
        if not step.skipped:
            handed = _only(recorded.gradients, step.gradients)
            step = replace(step, gradients=agreed(step, handed, wanted, self.rounding, replay, self.known))
            advance = replay.attempt if names else replay.step
            made = advance(step.before, step.gradients, step.learning_rates)
        sizes = {name: rounding_sizes(value, made.get(name, value)) for name, value in step.before.items()}
        search = self.known.search(wanted, {name: norm(value) for name, value in sizes.items()})
        search.offer([made, step.before])
        if search.doubtful():
            ideas = [step.before, made, step.gradients]
            if self.steps[place]:
                former = self.steps[place][-1]
                ideas += [former.before, former.gradients]
            search.mix(ideas)
            search.mix_each(ideas)
            if search.open(LIMIT) and not step.skipped:
                search.offer(replay.variants([*self.steps[place], step]))
        return replace(step, after=self.known.found(wanted, search, sizes))

    def _duplicate_of(self, place: int) -> int | None:
        """Return the first rank before this one with the same history, bit for bit."""
        if self.origins and any(origin is not self.origins[0] for origin in self.origins):
            return None
        return next(
            (other for other in range(place) if _same_history(self.recorded[other], self.recorded[place])), None
        )


def _only(tensors: Tensors, names: Collection[str]) -> Tensors:
    return {name: value for name, value in tensors.items() if name in names} if names else tensors


def _gradient_sizes(search: Search, right: ExpectedStep | None) -> Tensors:
    """Return about how large each entry is of what ideas lack: roundings of what a gradient is made of, or anything."""
    sizes = {}
    unexplained = search.open(LIMIT)
    for name, sketch in search.sketches.items():
        made_of = right.sizes.get(name) if right else None
        if made_of is not None and tuple(made_of.shape) == sketch.shape:
            sizes[name] = made_of + search.idea(name).abs() if name in unexplained else made_of
    return sizes


def _same_history(left: RankTrace, right: RankTrace) -> bool:
    return len(left.steps) == len(right.steps) and all(
        a.learning_rates == b.learning_rates
        and a.skipped == b.skipped
        and all(_same(getattr(a, part), getattr(b, part)) for part in ("before", "gradients", "after"))
        for a, b in zip(left.steps, right.steps, strict=True)
    )


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(_alike(left[name], right[name]) for name in left)


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, Sketch) or isinstance(right, Sketch):
        return isinstance(left, Sketch) and isinstance(right, Sketch) and left.identity == right.identity
    return bool(torch.equal(left, right))
