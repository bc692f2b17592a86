"""Decides when a step's gradients are compared with the joint forward, and describes their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.rank.joint.exchanges import Exchanged, ExchangeFunctions, IsInside, compared_calls, shared_by
from plumbline.check.rank.joint.forward import RecordedCall
from plumbline.check.rank.joint.meetings import Meetings
from plumbline.check.rank.joint.own_shards import dimensions_of_shards
from plumbline.check.rank.joint.pieces import JointPieces
from plumbline.check.rank.joint.pipelines import Pipelines
from plumbline.check.rank.joint.stages import Sent, digests, sent_as_product, sent_for
from plumbline.check.rank.joint.weights import JointParameter, leaves_of
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.local_gradients import ArrivedGradients
from plumbline.check.rank.master_layout import MasterLayouts
from plumbline.check.rank.store_exchange import AbsentRankError, Exchange
from plumbline.check.rank.unclipped import UnclippedGradients
from plumbline.recording.backward_passes import BackwardPasses, is_number
from plumbline.recording.flat_sharding import part_of
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.observer import Facts, Observer
from plumbline.recording.parameters import ParameterNames, parameters_of
from plumbline.recording.patching import attempt
from plumbline.recording.sharding import requested_divisors
from plumbline.replay.call import Activation
from plumbline.replay.unsharding import is_distributed

if TYPE_CHECKING:
    from plumbline.check.rank.joint.comparison import JointComparison

FLAT = (
    "the forward communicates, and FSDP1 keeps its parameters in flat tensors: use fully_shard (FSDP2) to have it "
    "judged"
)

ONLY_SOME = "ranks take part in the step in different ways, so their forwards were not recomputed together"

_NOTHING: tuple[Sequence[RecordedCall], Sequence[RecordedCall], Mapping[int, bool]] = [], [], {}

_SCALING = ("MulBackward0", "DivBackward0")
"""Nodes that turn a loss, or what stands in its place, into a scaled loss."""


class JointSteps(Observer):
    """Compares the gradients of steps that ranks cannot compute alone; the result is among the step's facts."""

    name = "joint"

    def __init__(
        self,
        optimizers: KnownOptimizers,
        names: ParameterNames,
        unclipped: UnclippedGradients,
        layouts: MasterLayouts,
    ) -> None:
        self._optimizers = optimizers
        self._names = names
        self._unclipped = unclipped
        self._layouts = layouts
        self.pipelines = Pipelines()
        self._exchange = Exchange()
        self._roll = Exchange("plumbline joint steps")
        self._functions = ExchangeFunctions()
        self._meetings = Meetings()
        self._begun: JointComparison | None = None
        self._losses: dict[int, float | None] = {}
        self._left_behind: set[int] = set()
        self._passes: BackwardPasses | None = None
        self._sent: dict[int, list[Sent]] = {}
        self._products: dict[int, Sent] = {}
        self._shards: dict[int, Mapping[int, frozenset[int]]] = {}
        self._found: Facts | None = None
        self._waiting = _NOTHING
        self._communicates = False
        self.is_tied: Callable[[Tensor], bool] = lambda parameter: False
        self.multiplied_by_hand: Callable[[], float | None] = lambda: 1.0

    def connect(self, passes: BackwardPasses, is_inside: IsInside) -> None:
        """Count passes that do not call ``torch.autograd.backward``; ``is_inside`` says whether a tracked call runs."""
        self._passes, self.pipelines.counted = passes, passes.counted
        self._functions.is_inside = is_inside

    def start(self) -> None:
        """Start following the functions by which a loss communicates."""
        super().start()
        self._functions.start()

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Follow the stages of a pipeline before its first step."""
        self.pipelines.follow()

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow the stages of a pipeline, if they were not yet imported before."""
        self.pipelines.follow()

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Note whether the pass begins at a loss, or at activations whose gradient comes from another rank."""
        ends_in_loss = all(map(is_number, roots))
        self._losses[number] = math.fsum(float(root.detach()) for root in roots) if ends_in_loss else None
        if ends_in_loss and all(map(_may_be_left_behind, roots)):
            self._left_behind.add(number)
        if ends_in_loss and len(roots) == 1 and (product := attempt(sent_as_product, roots[0])) is not None:
            self._products[number] = product
        if any(is_distributed(one) for optimizer in self._optimizers for one in parameters_of(optimizer)):
            self._shards[number] = attempt(dimensions_of_shards, roots) or {}
        given = zip(roots, () if self._passes is None else self._passes.given, strict=False)
        sent = [attempt(sent_for, root, one) for root, one in given if one is not None and not is_number(root)]
        if known := [one for one in sent if one is not None]:
            self._sent[number] = known

    def compare(
        self,
        calls: Sequence[RecordedCall],
        passes: Sequence[ArrivedGradients],
        beside: Iterable[Tensor] = (),
        received: Mapping[int, Sequence[Activation]] = MappingProxyType({}),
        *,
        communicates: bool,
    ) -> None:
        """Compare the gradients of a step if needed: ``communicates`` says whether its forward communicates.

        ``beside``: the parameters on which the loss depends other than through the outputs of calls. ``received``: the
        activations that reach calls only through other operations, by pass.
        """
        self._communicates |= communicates
        numbers = {one.number for one in passes} | {number for one in calls for number in one.cotangents}
        values = {number: self._losses.pop(number, math.nan) for number in sorted(numbers)}
        if communicates:
            values |= dict.fromkeys(self._left_behind & numbers)
        self._left_behind -= numbers
        sent = [one for number in sorted(numbers) for one in self._sent.pop(number, ())]
        products = {number: self._products.pop(number) for number in numbers & self._products.keys()}
        together = self._functions.take_has_communicated()
        shards = {number: self._shards.pop(number, {}) for number in sorted(numbers)}
        if not together:  # otherwise the losses of several ranks may depend on a shard
            calls = [replace(one, apart=_apart(one, shards)) for one in calls]
        in_parts = communicates or None in values.values() or any(one.call.is_distributed for one in calls)
        receiving = [
            one for one in calls if one.call.receives_activations or not received.keys().isdisjoint(one.cotangents)
        ]
        if not calls and self._begun is not None and self._begun.is_waiting:
            self._found = self._begun.resume(list(self._held(*self._waiting)))
            self._waiting = self._waiting if self._begun.is_waiting else _NOTHING
            return
        functions = self._functions.take()
        if not _are_several_ranks() or not (calls or functions):
            return
        is_joint = bool(calls) and bool(in_parts or receiving or products)
        if not self._all_take_part("forward" if is_joint else "loss" if functions else ""):
            return
        if is_joint:
            activations = {id(one): one for call in calls for one in call.call.activations}
            others = [each for own in received.values() for each in own]
            elsewhere = self._comparison.received_elsewhere(digests([*activations.values(), *others]))
            of_stages = {number: one for number, one in products.items() if one[0] in elsewhere}
            values |= dict.fromkeys(of_stages)
            sent += of_stages.values()
            ends_in_loss = {number: value is not None for number, value in values.items()}
            in_parts |= bool(of_stages)
            in_parts |= any(math.isnan(values[number] or 0.0) for one in receiving for number in one.cotangents)
            if any(part_of(parameter) is not None for one in calls for parameter in one.call.trainable):
                self._found = {"why": FLAT}
                return
            compared = self._compared_functions(functions)
            own_losses = [value for value in values.values() if value is not None]
            shared = shared_by(compared.get("functions", ()))
            from plumbline.check.rank.joint.derivative import RankLosses

            losses = RankLosses(
                own_losses,
                together,
                *shared,
                begin_at_losses=ends_in_loss,
                sent=sent,
                received=others,
            )
            divisors = requested_divisors(one.call.module for one in calls)
            held = list(self._held(calls, receiving, ends_in_loss))
            names = sorted({self._names.of_one(one) for one in beside})
            by_hand = self.multiplied_by_hand()
            found = self._comparison.compare(calls, held, losses, divisors, names, by_hand, in_parts=in_parts)
            self._waiting = (calls, receiving, ends_in_loss) if self._comparison.is_waiting else _NOTHING
            self._found = found | compared or None
        else:
            self._found = self._compared_functions(functions) or None

    @property
    def _comparison(self) -> JointComparison:
        from plumbline.check.rank.joint.comparison import JointComparison  # few trainings need it

        self._begun = self._begun or JointComparison(self._exchange, self._meetings)
        return self._begun

    def _all_take_part(self, part: str) -> bool:
        """Return whether all ranks compare the same ``part`` of a step; a rank that compares none does not wait."""
        if not part or self._comparison.obstacle:
            self._roll.say(part)
            return bool(part)
        try:
            every = self._roll.values(part)
        except AbsentRankError as error:
            self._comparison.leave(str(error))
            return True
        if any(other != part for other in every):
            self._found = {"why": ONLY_SOME}
        return self._found is None

    def _compared_functions(self, calls: Sequence[Exchanged]) -> Facts:
        """Compare the backward of functions by which the loss communicates, if every rank has called them."""
        if self._comparison.obstacle:
            return {}
        try:
            found = compared_calls(self._exchange, self._meetings, calls)
        except AbsentRankError as error:
            self._comparison.leave(str(error))
            return {}
        return {"functions": found} if found else {}

    def final_facts(self) -> Facts:
        """Return whether a forward of this rank communicates."""
        return {"communicates": self._communicates}

    def stop(self) -> None:
        """Drop the kept gradients."""
        super().stop()
        self._functions.stop()
        if self._begun is not None:
            self._begun.forget()
        self._waiting = _NOTHING

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Return the result of the comparison before the step."""
        found, self._found = self._found, None
        self.pipelines.stepped()
        return found

    def _held(
        self, calls: Sequence[RecordedCall], receiving: Sequence[RecordedCall], ends_in_loss: Mapping[int, bool]
    ) -> Iterator[JointParameter]:
        """Yield the parameters that calls use and an optimizer updates, directly or as copies."""
        leaves = leaves_of(self._names.roots)
        used = {id(parameter): (parameter, one) for one in calls for parameter in one.call.trainable}
        for one, held in self._layouts.held():
            if id(one) in used:
                parameter, user = used.pop(id(one))
                divided = self.pipelines.factor(one)
                pieces = [
                    (piece.own, scale_left(optimizer) * divided * self._unclipped.factor(piece.own.master))
                    for optimizer, piece in held
                    if piece.own is not None
                ]
                stage = self._stage(parameter, user, receiving, ends_in_loss)
                name, recorded = self._names.of_one(one), [piece.recorded_name for _, piece in held]
                yield JointPieces(name, parameter, pieces, recorded, divided, stage, is_tied=self.is_tied(one))
        for optimizer in self._optimizers:
            for one in parameters_of(optimizer):
                if id(one) in used:
                    scaled = scale_left(optimizer) * self.pipelines.factor(one)
                    clipped = self._unclipped.factor(one)
                    parameter, user = used.pop(id(one))
                    stage = self._stage(parameter, user, receiving, ends_in_loss)
                    name, leaf = self._names.of_one(one), leaves.get(id(one))
                    is_tied = self.is_tied(one) or self.is_tied(parameter)
                    yield JointParameter(name, parameter, leaf, scaled, clipped, stage, is_tied=is_tied)

    def _stage(
        self,
        parameter: nn.Parameter,
        user: RecordedCall,
        receiving: Sequence[RecordedCall],
        ends_in_loss: Mapping[int, bool],
    ) -> str:
        """Return the stage that uses a parameter: its number, or whether it receives and sends activations."""
        number = self.pipelines.stage_of(parameter)
        if number is not None:
            return f"{number}"
        before = "receives activations" if any(user is one for one in receiving) else ""
        return before if all(ends_in_loss[one] for one in user.cotangents) else f"{before} sends activations"


def _apart(one: RecordedCall, shards: Mapping[int, Mapping[int, frozenset[int]]]) -> frozenset[int]:
    """Return the dimensions of the mesh over which all backward passes begin at losses of this rank's shards."""
    every = [shards.get(number, {}).get(one.call.number, frozenset()) for number in one.cotangents]
    return frozenset.intersection(*every) if every else frozenset()


def _may_be_left_behind(root: Tensor) -> bool:
    """Return whether a backward pass may begin here only to reach a function that has sent activations to another rank.

    Such functions return a zero instead of a loss.
    """
    function = root.grad_fn
    while function is not None and function.name() in _SCALING:
        function = next((one for one, _ in function.next_functions if one is not None), None)
    is_own: bool = isinstance(function, torch.autograd.function.BackwardCFunction)
    return is_own and not bool(root.detach().any())


def _are_several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1
