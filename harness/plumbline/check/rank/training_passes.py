"""Follows a script's forwards and backward passes, and recomputes in float64 the gradients that arrive in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.evidence.training import REPEATS
from plumbline.check.rank.joint.forward import recorded_calls
from plumbline.check.rank.joint.steps import JointSteps
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.local_gradients import ArrivedGradients, LocalGradients, has_gradient_hooks
from plumbline.check.rank.master_layout import MasterLayouts
from plumbline.check.rank.observers.experts import NAME as EXPERTS
from plumbline.check.rank.observers.recomputation import NAME as RECOMPUTATION
from plumbline.check.rank.observers.recomputation import recomputed_otherwise
from plumbline.check.rank.optimizer.loss_scale import LossScale
from plumbline.check.rank.own_errors import OwnErrors
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.check.rank.tensor_digest import written
from plumbline.recording.backward_passes import is_number
from plumbline.recording.flat_sharding import arrivals
from plumbline.recording.observer import Observer, Observers
from plumbline.recording.parameters import ParameterNames, parameters_of
from plumbline.recording.sharding import arrival_leaves, is_flat
from plumbline.replay.checkpointing import nothing_recomputed
from plumbline.replay.collectives import collectives, follow_messages
from plumbline.replay.exact_gradients import ExactGradients, ExactPass
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.reasons import OUTSIDE
from plumbline.replay.tracked_calls import TrackedCalls
from plumbline.replay.unwrapping import unwrapped


@dataclass
class _Entry:
    one: ArrivedGradients
    steps: set[int] = field(default_factory=set)
    closed: bool = False


class PassWindows:
    """Assigns backward passes to optimizer steps. Keeps passes until every optimizer that they concern has stepped.

    Successive passes belong to the optimizers that step after them, before another pass begins. This separates the
    passes of two optimizers that take turns, as in a GAN, although each leaves gradients in the other's parameters.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._last_step: dict[int, int] = {}

    def add(self, one: ArrivedGradients) -> None:
        """Add a backward pass. It closes the earlier passes after which an optimizer has already stepped."""
        for entry in self._entries:
            entry.closed = entry.closed or bool(entry.steps)
        self._entries.append(_Entry(one))

    def take(
        self, optimizer: int, running: ArrivedGradients | None = None
    ) -> tuple[list[ArrivedGradients], list[ArrivedGradients]]:
        """Return the passes since an optimizer's last step: those that belong to its current step, and the others.

        If the step raises, and is taken again before another pass begins, it gets the same passes again. Calls of
        ``torch.autograd.grad`` count only if the step has no other passes: they may serve another purpose.

        Args:
            optimizer: the number of the optimizer.
            running: the backward pass inside which the optimizer steps, from a hook on its parameter.
        """
        last = self._last_step.get(optimizer, -1)
        since = [entry for entry in self._entries if entry.one.number > last]
        own = [entry for entry in since if not entry.closed]
        for entry in own:
            entry.steps.add(optimizer)
        passes = [entry.one for entry in own] + ([] if running is None else [running])
        others = [entry.one for entry in since if entry.closed and not entry.one.by_grad]
        return [one for one in passes if not one.by_grad] or passes, others

    def takes_turns(self, optimizer: int, other: int) -> bool:
        """Return whether two optimizers took their last steps after different passes."""
        return self._last_step.get(optimizer) != self._last_step.get(other)

    def stepped(self, optimizer: int, running: ArrivedGradients | None = None, *, optimizers: int = 0) -> None:
        """Note that an optimizer has taken its step, and forget passes that no known optimizer needs any more.

        All passes are kept for those of the first ``optimizers`` that have not stepped yet: some step less often than
        others. The latest are also kept for optimizers that are not known yet, and may step after the others.
        """
        latest = [entry.one.number for entry in self._entries[-1:]] + ([] if running is None else [running.number])
        if latest:
            self._last_step[optimizer] = max(latest)
        if self._last_step:
            least = min(self._last_step.get(number, -1) for number in {*self._last_step, *range(optimizers)})
            self._entries = [entry for entry in self._entries if not entry.closed or entry.one.number > least]


HOOKED = "the script has hooks on it, and activation checkpoints recomputed different values than the forward"


class NameObserver(Observer):
    """Names the parameters of each module that is called."""

    name = "names"
    essential = True

    def __init__(self, names: ParameterNames) -> None:
        self._names = names

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._names.add(unwrapped(module))


class TrainingPasses:
    """Follows passes between ``start`` and ``stop``, tells observers about them, and assigns them to optimizer steps.

    ``uncovered`` has the names of parameters whose gradients cannot be recomputed, each with the reason.
    """

    def __init__(
        self,
        options: RecordingOptions,
        sample: ParameterSample,
        optimizers: KnownOptimizers,
        names: ParameterNames,
        observers: Observers,
        loss_scale: LossScale,
        errors: OwnErrors,
        joint: JointSteps,
        layouts: MasterLayouts,
    ) -> None:
        self._replays = options.replays and not options.dry_run
        self._sample = sample
        self._optimizers = optimizers
        self._names = names
        self._observers = observers
        self._loss_scale = loss_scale
        self._errors = errors
        self._joint = joint
        self._layouts = layouts
        self._gradients = LocalGradients(self._pass_begins, self._pass_ends)
        self._calls = TrackedCalls(
            self._current_pass,
            observers,
            lambda tensor: any(tensor is one for one in self._optimizers.parameters()),
        )
        self._exact = ExactGradients(
            self._calls,
            layouts.exact,
            ReplayPrecision(options.truth),
            sample.has,
            self._before_replay,
        )
        self._windows = PassWindows()
        self._scales: dict[int, float] = {}
        joint.connect(self._gradients.passes, lambda: self._calls.is_inside)
        self._gradients.passes.trains = self._trains
        self._by_grad: set[int] = set()
        self._following = False
        self.uncovered: dict[str, str] = {}

    @property
    def count(self) -> int:
        return self._gradients.passes.count

    def install(self) -> None:
        """Number the backward passes, and count messages, from now on."""
        follow_messages()
        self._gradients.passes.install()

    def start(self) -> None:
        self._following = True
        self._exact.forget()
        self._calls.start()

    def stop(self) -> None:
        self._following = False
        self._gradients.stop()
        self._calls.stop()

    def take(self, optimizer: Optimizer, number: int) -> tuple[list[ArrivedGradients], list[ArrivedGradients]]:
        """Return the passes that belong to an optimizer's current step, and other passes that left gradients for it.

        The gradients of all these passes are recomputed, unless the optimizer steps inside a backward pass, from a
        hook.
        """
        running = self._gradients.current
        own, others = self._windows.take(number, running)
        # A forward may write to parameters that no gradient reaches, such as a bias that balances experts.
        trained = [id(one) for one in parameters_of(optimizer) if one.grad is not None]
        for one in own:
            prints = hash(tuple(map(one.written.get, trained)))
            one.facts["weights"] = [*one.facts.get("weights", ()), (number, prints)]
            if one.belongs_to_others(parameters_of(optimizer), self._optimizers.parameters()):
                one.facts["not_for"] = [*one.facts.get("not_for", ()), number]
        if running is None:
            self._layouts.find(optimizer, number, [*own, *others])
            for one in (*own, *others):
                one.reduce(self._layouts.reduced)
            self._replay([*own, *others], number)
        return own, others

    def stepped(self, optimizer: int) -> None:
        self._windows.stepped(optimizer, self._gradients.current, optimizers=len(list(self._optimizers)))

    def _trains(self, inputs: Any) -> bool:
        """Return whether these are all trainable parameters of an optimizer, or of a model with master weights."""
        given = {id(inputs)} if isinstance(inputs, Tensor) else set(map(id, inputs))
        trained = [*map(parameters_of, self._optimizers), self._layouts.candidates() if self._following else []]
        needed = [{id(one) for one in own if one.requires_grad} for own in trained]
        return any(own and own <= given for own in needed)

    def _current_pass(self) -> int | None:
        return None if self._gradients.current is None else self._gradients.current.number

    def _before_replay(self, *what: Any) -> None:
        self._observers.tell(lambda one: one.before_replay(*what))

    def _pass_begins(self, one: ArrivedGradients, roots: Sequence[Tensor]) -> None:
        if self._following:
            self._errors.keep(lambda: self._begin(one, roots))

    def changes_arriving(self, parameter: Tensor) -> bool:
        """Return whether hooks of the script change a parameter's gradient before it arrives."""
        return has_gradient_hooks(parameter) and id(parameter) not in self._gradients.reducing

    def _begin(self, one: ArrivedGradients, roots: Sequence[Tensor]) -> None:
        for optimizer in self._optimizers:
            self._sample.add(parameters_of(optimizer))
        self._calls.pass_begins(one.number, roots)
        leaves = {id(one): (one, one) for one in self._optimizers.parameters() if not is_flat(one)}
        leaves |= {id(one): (one, leaf) for one, leaf in arrival_leaves(self._names.roots)}
        self._gradients.follow(leaves.values(), self._sample.has)
        for parameter, leaf, take in arrivals(self._names.roots):
            self._gradients.follow([(parameter, leaf)], self._sample.has, take=take)
            leaves[id(parameter)] = parameter, leaf
        copied = [one for one in self._layouts.candidates() if id(one) not in leaves]
        self._gradients.follow(((one, one) for one in copied), reduced=self._layouts.reduced)
        one.facts["is_inner"] = not any(map(is_number, roots))
        every = list(self._optimizers.parameters())
        one.written = dict(zip(map(id, every), written(every), strict=True))
        with nothing_recomputed():
            self._observers.tell(lambda observer: observer.backward_begins(one.number, roots))
        one.sent = -sum(collectives().values())

    def _pass_ends(self, one: ArrivedGradients) -> None:
        if self._following:
            self._errors.keep(lambda: self._end(one))

    def _end(self, one: ArrivedGradients) -> None:
        if self._gradients.error is not None:
            raise self._gradients.error
        one.sent += sum(collectives().values())
        self._layouts.pass_ends()
        one.facts |= self._observers.tell(lambda observer: observer.backward_ends(one.number))
        one.facts["reached"] = self._calls.reached(one.number)
        one.facts["for_inputs"] = self._calls.differentiates_inputs(one.number)
        if self._gradients.passes.has_failed:
            return  # the script catches the error and retries, as with a smaller batch if memory was short
        one.scale = self._scales[one.number] = self._loss_scale.scale
        if one.by_grad:
            one.facts["by_grad"] = True
            self._by_grad.add(one.number)
        if one.local or one.distributed or one.in_flat_parts or one.whole:
            one.facts |= {"distributed": one.distributed, "in_flat_parts": one.in_flat_parts}
            self._windows.add(one)

    def _replay(self, passes: Sequence[ArrivedGradients], optimizer: int) -> None:
        """Recompute the gradients of these passes in float64. Passes without calls to replay get no exact gradients.

        The judge compares the script's own gradients. Those in float64 show how large rounding noise is, and that
        forwards can be repeated, which one step of each kind does. Whether a router's gradient is zero is a question
        about every step.
        """
        received = self._calls.take_received()
        if not self._replays:
            self._calls.forget()
            return
        unused, self._by_grad = self._by_grad - {one.number for one in passes}, set()
        for call in self._calls.pending():
            for number in unused & call.cotangents.keys():
                del call.cotangents[number]
        calls = recorded_calls(self._calls.pending(), self._scales)
        self._scales = {}
        otherwise = any(recomputed_otherwise(one.facts) for one in passes)
        arrived = frozenset((one.sent if RECOMPUTATION in one.facts else 0, frozenset(one.local)) for one in passes)
        sent = frozenset(one.sent for one in passes)
        routes = any(EXPERTS in one.facts for one in passes)
        kind = None if routes else (optimizer, self._layouts.of(optimizer) is None, arrived)
        found_by_pass = self._exact.compute(kind=kind, sent=sent, recomputed_otherwise=otherwise)
        exact = {number: found for number, found in found_by_pass.items() if number not in unused}
        for one in passes:
            found = exact.get(one.number)
            if found is not None:
                if otherwise:
                    _leave_out_hooked(found)
                if one.by_grad:
                    _leave_out(found, [each for each in found.gradients if id(each) not in one.local])
                if found.repeats:
                    one.facts[REPEATS] = True
                else:
                    one.exact = {id(parameter): gradient for parameter, gradient in found.gradients.items()}
                one.native = {id(parameter): gradient for parameter, gradient in found.native.items()}
                for parameter, reason in found.uncovered.items():
                    self.uncovered.setdefault(self._names.of_one(parameter), reason)
                # Whether or not its calls communicate, no replay of them gives its whole gradient.
                self.uncovered |= {self._names.of_one(parameter): OUTSIDE for parameter in found.beside}
        with self._calls.paused():
            beside = {parameter for one in exact.values() for parameter in one.beside}
            beside |= self._of_others(optimizer)
            self._joint.compare(
                calls,
                passes,
                beside,
                received,
                communicates=any(one.communicates for one in exact.values()),
            )

    def _of_others(self, optimizer: int) -> set[Tensor]:
        """Return the parameters of optimizers that take turns with one: they may hold gradients of earlier passes."""
        every = list(enumerate(self._optimizers))
        own = next(one for number, one in every if number == optimizer)
        others = [one for number, one in every if one is not own and self._windows.takes_turns(optimizer, number)]
        return {one for other in others for one in parameters_of(other)} - {*parameters_of(own)}


def _leave_out_hooked(found: ExactPass) -> None:
    """Leave out parameters with gradient hooks of the script: these gradients differ from a replay in any case."""
    hooked = [one for one in found.native if has_gradient_hooks(one)]
    _leave_out(found, hooked)
    found.uncovered |= dict.fromkeys(hooked, HOOKED)


def _leave_out(found: ExactPass, parameters: Iterable[nn.Parameter]) -> None:
    for one in parameters:
        found.gradients.pop(one, None)
        found.native.pop(one, None)
