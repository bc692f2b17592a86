"""One parameter's gradient at one step, compared with the derivative of the joint forward of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plumbline.check.evidence.training import Facts
from plumbline.judge.hypothesis import Hypothesis, Match, holds, register
from plumbline.judge.mistakes.accumulation import PREVIOUS_STEP_NOT_ZEROED
from plumbline.judge.truth import Combination, GradientCase, GradientMistake, SomeParameters, scaled
from plumbline.report.text import listed

_MEASURED = (
    "name", "received", "left", "left_in_parts", "shares", "noise", "parts", "in_pieces", "began_alike", "copies",
    "one_gradient",
)  # fmt: skip
"""The facts of a wrong gradient that are taken over as they were recorded."""


@dataclass(frozen=True, eq=False)
class JointGradient(GradientCase):
    """What the optimizers on ``ranks`` received for one parameter, along a random direction.

    ``received``, ``left`` and ``shares`` are scalar products with the direction. ``received``: the gradient that the
    optimizers received. ``left``: what the previous step left in the gradient. ``shares``: what each backward pass of
    each rank adds to the right gradient. ``left_in_parts``: the share of ``left`` in parameters that have only one
    copy. ``others``: the same numbers for parameters that were right at this step, each along a direction through
    several of them. A mistake in all parameters must predict these as well. ``world`` counts the ranks that compute a
    loss, over which gradients are averaged.

    ``began_alike``: other ranks began with the same values of a parameter of this name, but received a different
    gradient. ``copies``: the ratio of all such copies to those that received this gradient. ``with_all_copies``: the
    same numbers along a direction through all copies, with the shares of this copy in ``own``. ``own_path``: the name
    of a parameter whose copies receive only what flows through each rank's own part of the model. ``one_gradient``:
    ranks that hold different parts received the same gradient. ``parts``: for each rank that holds a part of the
    parameter, what it received, what its own loss adds to the right gradient, and the noise of both. ``in_pieces``:
    optimizers step copies of the parameter.

    ``functions``: functions that communicate in the forward and whose backward is not the derivative.
    ``clipped_apart``: ranks clipped their parts separately, each to the same norm. ``has_last_pass_apart``: all wrong
    gradients together show that the last backward pass was not reduced. ``has_left_over``: all wrong gradients together
    show that they contain the previous step's. ``has_one_gradient``: ``one_gradient`` holds for some wrong gradient of
    the step.
    """

    index: int
    rank: int
    name: str
    ranks: tuple[int, ...]
    received: float
    left: float
    shares: Sequence[Sequence[float]]
    noise: float
    others: Sequence[Facts]
    common_factor: float
    began_alike: bool
    copies: float = 1.0
    one_gradient: bool = False
    functions: tuple[str, ...] = ()
    own_path: str = ""
    parts: Sequence[Sequence[float]] = ()
    in_pieces: bool = False
    limit: float = 0.0
    accumulate: int = 1
    world: int = 1
    clipped_apart: bool = False
    has_last_pass_apart: bool = False
    has_left_over: bool = False
    has_one_gradient: bool = False
    left_in_parts: float = 0.0
    with_all_copies: Facts = field(default_factory=dict)

    @classmethod
    def of(cls, index: int, wrong: Facts, found: Facts, window: int) -> JointGradient:
        """Return a wrong gradient from the facts that a rank recorded about a step."""
        every = found["wrong"]
        factors = [one["received"] / one["right"] if one["right"] else math.inf for one in every]
        first = factors[0]
        directions = [(one["received"], one["right"], one["noise"]) for one in every]
        directions += [tuple(again) for one in every for again in one["again"]]
        agree = all(
            abs(received - first * right) <= found["limit"] * (1 + abs(first)) * noise
            for received, right, noise in directions
        )
        return cls(
            index,
            wrong["ranks"][0],
            ranks=tuple(wrong["ranks"]),
            limit=found["limit"],
            accumulate=window,
            others=found["right"],
            common_factor=first if agree else math.nan,
            functions=tuple(found.get("not_derivatives", ())),
            world=found["losses"],
            with_all_copies=wrong["with_all_copies"] or {},
            **{name: wrong[name] for name in _MEASURED},
        )

    @property
    def is_a_copy(self) -> bool:
        """Whether this is one of several copies, and received only its own share of the gradient."""
        own = SomeParameters(scaled(self.copies))
        return self.began_alike and all(misfit <= self.limit for misfit in self.misfits(own))

    @property
    def may_be_a_summed_part(self) -> bool:
        """Whether the gradient would also be that of a separate part, if it were divided by the number of losses.

        Losses of other ranks then depend on the part.
        """
        others = [share for rank, passes in enumerate(self.shares) if rank not in self.ranks for share in passes]
        return self.copies == self.world and any(abs(one) > self.limit * self.noise for one in others)

    @property
    def is_of_some_ranks(self) -> bool:
        """Whether several ranks share a gradient that lacks the shares of other ranks with a copy."""
        return self.is_a_copy and not self.may_be_whole and len(self.ranks) > 1

    @property
    def is_averaged_with_others(self) -> bool:
        """Whether parts of this parameter have one gradient, or its copies lack those ranks that parts also lack."""
        return self.one_gradient or (self.has_one_gradient and self.is_of_some_ranks)

    @property
    def is_whole(self) -> bool:
        """Whether this is one of several copies, and received the gradient of all of them instead of its own."""
        is_own = abs(self.received_along_copies - self.own_alone) <= self._within
        return bool(self.with_all_copies) and self.may_be_whole and not is_own

    @property
    def may_be_whole(self) -> bool:
        within = self.limit * self.noise_along_copies
        return abs(self.received_along_copies - self.of_all_copies) <= within

    @property
    def may_have_its_last_pass_apart(self) -> bool:
        """Whether the gradient fits a last backward pass that was not reduced, unlike the passes before it."""
        has_others = any(len(rank) > 1 for rank in self._along_copies["shares"])
        return has_others and abs(self.received_along_copies - self.last_pass_apart) <= self._within

    @property
    def shows_its_last_pass(self) -> bool:
        """Whether ``last_pass_apart`` is clearly different from both the gradient of all copies and the copy's own."""
        return all(abs(one - self.last_pass_apart) > 2 * self._within for one in (self.of_all_copies, self.own_alone))

    @property
    def _along_copies(self) -> Facts:
        """The measurements along a direction through all copies, or through this parameter if it has no copies."""
        alone = {"received": self.received, "shares": self.shares, "own": self.shares, "noise": self.noise}
        return self.with_all_copies or alone

    @property
    def received_along_copies(self) -> float:
        return float(self._along_copies["received"])

    @property
    def noise_along_copies(self) -> float:
        return float(self._along_copies["noise"])

    @property
    def of_all_copies(self) -> float:
        """What a copy should receive."""
        return math.fsum(map(math.fsum, self._along_copies["shares"]))

    @property
    def own_alone(self) -> float:
        """What a copy receives if it is not reduced with any other."""
        return self._own_factor * math.fsum(map(math.fsum, self._along_copies["own"]))

    @property
    def last_pass_apart(self) -> float:
        """What a copy receives if only its last backward pass is not reduced with any other."""
        reduced = [share for rank in self._along_copies["shares"] for share in rank[:-1]]
        return math.fsum([*reduced, *(self._own_factor * rank[-1] for rank in self._along_copies["own"] if rank)])

    @property
    def _own_factor(self) -> float:
        return self.copies if self.with_all_copies else float(self.world)

    @property
    def _within(self) -> float:
        return self.limit * self._own_factor * self.noise_along_copies

    @property
    def is_of_the_holders_samples(self) -> bool:
        """Whether each rank's part has the gradient of that rank's own loss only, or of its share in the mean."""
        return any(abs(own) > self.limit * noise for _, own, noise in self.parts) and any(
            all(abs(received - factor * own) <= self.limit * factor * noise for received, own, noise in self.parts)
            for factor in (1, len(self.parts), self.world)
        )

    @property
    def micro_batches(self) -> int:
        return len(self.shares[self.rank])

    @property
    def scales(self) -> Sequence[float | None]:
        return [None] * self.world

    @property
    def has_shares(self) -> Sequence[bool]:
        return [bool(one) for one in self.shares]

    @property
    def has_earlier_step(self) -> bool:
        return self.left != 0

    @property
    def zeros(self) -> Sequence[bool]:
        return [self.received == 0, *(one["received"] == 0 for one in self.others)]

    @property
    def factor(self) -> float:
        right = self.value(scaled(1.0))
        return self.received / right if right else math.inf

    @property
    def is_right(self) -> bool:
        return self._misfit(scaled(1.0)) <= self.limit

    def misfits(self, prediction: Combination | SomeParameters | Match) -> Iterator[float]:
        """Yield the misfit of a prediction; one about all parameters must also fit those that were right.

        Rounding can hide in these what the previous step left. Other mistakes change every gradient that can be seen.
        """
        if isinstance(prediction, Match):
            yield 0.0
        elif isinstance(prediction, SomeParameters):
            yield self._misfit(prediction.combination)
        elif not prediction.left_over and any(
            abs(one["received"]) > 2 * self.limit * one["noise"] for one in self.others
        ):
            yield math.inf
        else:
            yield max([self._misfit(prediction), *(replace(self, **one)._misfit(prediction) for one in self.others)])

    def value(self, combination: Combination) -> float:
        """Return the scalar product of a combination of this step's shares."""
        return math.fsum(
            combination.weight(rank, index, len(passes)) * share
            for rank, passes in enumerate(self.shares)
            for index, share in enumerate(passes)
        )

    def _misfit(self, combination: Combination) -> float:
        if combination.earlier is not None:
            return math.inf
        weights = [
            combination.weight(rank, index, len(passes))
            for rank, passes in enumerate(self.shares)
            for index in range(len(passes))
        ]
        largest = max(map(abs, weights), default=0.0)
        value = self.value(combination) + combination.left_over * self.left
        return abs(self.received - value) / (self.noise * max(1.0, largest))

    @property
    def figures(self) -> dict[str, Any]:
        return {
            **super().figures,
            "some": len(self.ranks),
            "name": self.name,
            "functions": listed(self.functions),
            "copy": self.own_path,
            "unless_parts": _UNLESS_PARTS if self.may_be_a_summed_part else "",
        }


def _scaled_again(case: GradientCase) -> Iterator[Combination]:
    """Predict that a pipeline schedule, at the end of each window, also divides what earlier windows left."""
    count = case.micro_batches
    for windows in (one for one in range(2, count) if count % one == 0):
        size = count // windows
        yield Combination(lambda r, b, n, size=size, last=windows - 1: size ** (b // size - last))  # type: ignore[misc]


def _scaled(case: JointGradient) -> Iterator[Match]:
    if math.isfinite(case.common_factor):
        yield Match()


_UNLESS_PARTS = (
    ". If the ranks hold separate parts, such as experts or embedding tables, divide their gradients by the number of "
    "ranks instead, and start them with different values"
)

_SUM_THE_INPUT = (
    "sum the gradient of a sharded layer's input over its ranks: use Megatron's copy_to_tensor_model_parallel_region, "
    "or DTensor.to_local(grad_placements=[Partial()])"
)

register(
    JointGradient,
    Hypothesis("backward-wrong", "sync", holds(lambda case: bool(case.functions)),
        "wrong because the backward of {functions} is not the derivative of its forward",
        "compare its backward with finite differences: an all-to-all needs the inverse all-to-all, an "
        "all-gather a reduce-scatter, and a ring returns each gradient to the rank that sent the input. Wrong "
        "gradients of layers between it and the loss have another cause", 700),
    Hypothesis("averaged-over-some-ranks", "sync", holds(lambda case: case.is_of_some_ranks),
        "averaged over {some} of the {world} ranks only, although more ranks start with the same values",
        "all-reduce over all ranks that hold a parameter, also over those that hold parts of the same sequences", 695),
    Hypothesis("not-synchronised", "sync", holds(lambda case: case.in_pieces and case.is_of_the_holders_samples),
        "those of each rank's own samples",
        "average gradients over the ranks of data parallelism before they are copied to those that the optimizer "
        "holds", 696),
    Hypothesis("of-the-holders-samples", "sync", holds(lambda case: case.is_of_the_holders_samples),
        "of each rank's own samples only, in that rank's part of {name}",
        "call the module that holds the weight, so that its hooks gather it and reduce its gradient, or gather it with "
        "full_tensor(grad_placements=[Partial()]) and divide the gradient by the number of ranks", 694),
    Hypothesis("clipped-shard-by-shard", "clipping", holds(lambda case: case.clipped_apart),
        "clipped by the norms of parts of the model, so that the parts have different factors",
        "clip by the norm of the whole model: add the squared norms of all parts with an all-reduce, and count copies "
        "once", 697),
    Hypothesis("some-tensors-scaled", "averaging", _scaled,
        "{factor} × the right ones for some parameters, such as {name}",
        "check whether gradients are reduced over ranks that hold different shards, or whether several ranks add the "
        "same loss", 45),
    Hypothesis("some-parameters-not-synchronised", "sync", holds(lambda case: case.is_a_copy),
        "not reduced: {name} starts with the same values on several ranks, but each of them receives only the gradient "
        "of its own copy",
        "all-reduce the gradients of all replicated parameters{unless_parts}", 356),
    Hypothesis("some-micro-batches-not-synchronised", "accumulation", holds(lambda case: case.has_last_pass_apart),
        "reduced too early: those of the last backward pass of a step are not averaged over ranks",
        "all-reduce gradients after the last backward pass, and divide the sum by the number of ranks", 355),
    GradientMistake("scaled-with-every-window", "accumulation", _scaled_again,
        "divided again by the number of micro-batches at the end of each run of the pipeline schedule in a step",
        "create the schedule with scale_grads=False, and divide once before the optimizer's step", 359),
    Hypothesis("parts-of-a-sum", "sync", holds(lambda case: bool(case.own_path)),
        "incomplete for {copy} and others: each rank has only its own part of a sum over ranks",
        _SUM_THE_INPUT, 357),
    Hypothesis("blocks-averaged-with-each-other", "sync", holds(lambda case: case.is_averaged_with_others),
        "equal on ranks that hold different parts of a parameter, such as {name}",
        "reduce gradients only over ranks that hold the same parameter: shards are not replicas", 358),
    Hypothesis(PREVIOUS_STEP_NOT_ZEROED.name, "accumulation", holds(lambda case: case.has_left_over),
        PREVIOUS_STEP_NOT_ZEROED.description, PREVIOUS_STEP_NOT_ZEROED.hint, 50),
    Hypothesis("parts-of-a-sum", "sync", holds(lambda case: case.began_alike),
        "different for copies of {name}, which starts with the same values on several ranks",
        _SUM_THE_INPUT, 40),
    Hypothesis("exchanged-otherwise", "sync", holds(lambda case: True),
        "not explained by any known mistake in their reduction",
        "check the backward of each collective in the forward: a broadcast needs a reduce to its source, an all-gather "
        "a reduce-scatter", 5),
)  # fmt: skip
