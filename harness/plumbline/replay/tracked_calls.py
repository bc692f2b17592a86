"""Follows the calls of a training's outermost modules, and records what is needed to run each of them again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from plumbline.recording.backward_passes import in_backward
from plumbline.recording.flat_sharding import flat_units, part_of
from plumbline.recording.module_calls import ModuleCalls, run_noted
from plumbline.recording.observer import Observers
from plumbline.recording.patching import attempt
from plumbline.recording.sharding import arrival_leaves, local, shards_of_fsdp2
from plumbline.replay import unwrapping
from plumbline.replay.alias import alias
from plumbline.replay.call import Activation, TrackedCall, UsedParameter, sample
from plumbline.replay.collectives import collectives, communicates_beside, since
from plumbline.replay.nested import map_tensors, tensors_in
from plumbline.replay.random_state import AutocastState, RandomState
from plumbline.replay.reasons import FLAT_PARTS, SECOND_ORDER, STALE
from plumbline.replay.unsharding import is_distributed, shards
from plumbline.replay.unwrapping import Role
from plumbline.replay.uses import received_leaf, runs_own_code, used_outside

ROWS = 64
"""Of how many rows one entry is compared to see that a forward changes a frozen parameter."""

CurrentPass = Callable[[], "int | None"]
"""Returns the number of the backward pass that is running, None if there is none that counts."""


class _Thread(threading.local):
    """The state of a thread: whether it is inside a tracked call, and which modules were called outside of one.

    ``in_constant``: it is inside a call whose outputs have no gradient. ``wrapped``: inside an undecided call, the
    counts of collectives in the wrappers that it called, which may broadcast buffers.
    """

    inside = False
    in_constant = False

    def __init__(self) -> None:
        self.called: list[nn.Module] = []
        self.wrapped: list[dict[str, int]] | None = None


class TrackedCalls:
    """The calls of outermost modules with trainable parameters, in the order in which they began.

    Calls are followed between ``start`` and ``stop``, except while ``paused``. ``observers`` are told of each call,
    of modules that a backward pass runs again, and of modules that are called without gradients or have no parameter
    that requires one. ``is_weight`` returns whether an optimizer updates a tensor that is no parameter. ``unrecorded``
    has the parameters of calls that could not be recorded, with the reason; the script continues.
    """

    def __init__(
        self,
        current_pass: CurrentPass,
        observers: Observers | None = None,
        is_weight: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self.calls: list[TrackedCall] = []
        self.unrecorded: dict[nn.Parameter, str] = {}
        self._current_pass = current_pass
        self._observers = Observers(()) if observers is None else observers
        self._is_weight = is_weight
        self._thread = _Thread()
        self._buffers: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._moving: dict[int, nn.Parameter] = {}  # frozen ones that their module changes in its forward
        self._arrivals: Any = WeakTensorKeyDictionary()  # activations of each received tensor, with their hooks
        self._outside: dict[int, list[nn.Parameter]] = {}
        self._begun_inside: set[int] = set()  # passes with given gradients, not from a loss
        self._to_inputs: set[int] = set()  # passes that reach leaves that are not weights
        self._from_elsewhere: dict[int, list[Activation]] = {}  # these leaves, by pass
        self._recording = False
        self._number = 0
        self._patch: ModuleCalls | None = None

    def start(self) -> None:
        self._recording = True
        self._patch = ModuleCalls(self._called)
        self._patch.install()

    def stop(self) -> None:
        """Stop following calls. Calls recorded so far still receive their gradients."""
        self._recording = False
        self._buffers.clear()
        self._moving.clear()
        self._arrivals.clear()
        if self._patch is not None:
            self._patch.remove()

    @property
    def is_inside(self) -> bool:
        return self._thread.inside

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no calls inside the block."""
        before, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = before

    def pending(self) -> list[TrackedCall]:
        """Return the calls at which gradients arrived."""
        return [one for one in self.calls if one.cotangents]

    def reached(self, number: int) -> list[int]:
        """Return the numbers of the calls that a backward pass has reached."""
        return [one.number for one in self.calls if number in one.cotangents]

    def differentiates_inputs(self, number: int) -> bool:
        """Return whether a backward pass computes gradients of a call's inputs, but none of second order."""
        own = [one for one in self.calls if number in one.cotangents]
        if any(one.obstacle == SECOND_ORDER for one in own):
            return False
        return number in self._to_inputs or any(number in each.gradients for one in own for each in one.activations)

    def forget(self) -> None:
        """Forget the gradients that arrived, and the calls that no other backward pass can reach."""
        for call in self.calls:
            call.cotangents.clear()
        self.calls = [one for one in self.calls if not one.is_over]

    def pass_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Note the roots of a backward pass, and the parameters that it reaches outside of tracked calls."""
        if self._recording:
            if any(one.numel() != 1 for one in roots):
                self._begun_inside.add(number)
            leaves = used_outside(roots)
            found = [one for one in leaves if isinstance(one, nn.Parameter)]
            self._outside.setdefault(number, []).extend(found)
            inputs = [one for one in leaves if not isinstance(one, nn.Parameter) and not self._is_weight(one)]
            if inputs:
                self._to_inputs.add(number)
                known = (attempt(self._activation, one) for one in inputs)
                self._from_elsewhere[number] = [one for one in known if one is not None]

    def take_received(self) -> dict[int, list[Activation]]:
        """Return the activations that reach calls only through other operations, by pass since the last time."""
        taken, self._from_elsewhere = self._from_elsewhere, {}
        return taken

    def take_outside(self) -> dict[int, list[nn.Parameter]]:
        """Return the parameters that are used outside of tracked calls, by backward pass since the last time."""
        taken, self._outside = self._outside, {}
        self._begun_inside.clear()
        self._to_inputs.clear()
        return taken

    def _called(self, run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        thread = self._thread
        if self._recording and thread.inside:
            return run_noted(run, module, args, kwargs)
        if not self._recording or _is_transformed():
            return run(module, *args, **kwargs)
        role = unwrapping.role_of(module) if torch.is_grad_enabled() else Role.UNTRAINED
        if role is Role.UNTRAINED:
            return run(module, *args, **kwargs) if thread.in_constant else self._run_constant(run, module, args, kwargs)
        if self._is_computed_again(module):
            self._observers.tell(lambda one: one.runs_again(module))
            return run(module, *args, **kwargs)
        thread.called.append(module)
        if role is Role.WRAPPER:
            before = {} if thread.wrapped is None else collectives()
            output = run(module, *args, **kwargs)
            if thread.wrapped is not None:
                thread.wrapped.append(since(before))
            return output
        if role is Role.UNDECIDED:
            return self._undecided(run, module, args, kwargs)
        call = self._begin(module, args, kwargs)
        thread.inside = True
        try:
            output = run_noted(run, module, args, kwargs)
        finally:
            thread.inside = False
        return self._end(call, output)

    def _run_constant(
        self, run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        attempt(self._observers.tell, lambda one: one.constant_called(module))
        self._thread.in_constant = True
        try:
            return run(module, *args, **kwargs)
        finally:
            self._thread.in_constant = False

    def _undecided(
        self, run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the call and those inside it, and keep the inner ones if ``module`` turns out to be a wrapper."""
        thread = self._thread
        forward, child = vars(module).get("forward"), unwrapping.sole_child(module)
        call = self._begin(module, args, kwargs)
        first, thread.called, outer = len(self.calls), [], thread.called
        wrapped, thread.wrapped = thread.wrapped, []
        has_wrappers = bool(unwrapping.wrapped_in(module))
        try:
            # Observers are told of calls inside of a wrapper as if nothing ran around it.
            output = run(module, *args, **kwargs) if has_wrappers else run_noted(run, module, args, kwargs)
        finally:
            thread.called, called = outer, thread.called
            counts, thread.wrapped = thread.wrapped, wrapped
        if wrapped is not None:
            wrapped += counts
        is_wrapper = any(one is child for one in called) or has_wrappers
        counts = counts or [one.collectives for one in self.calls[first:]]
        if is_wrapper and call is not None and communicates_beside(call, counts):
            is_wrapper = False
        if is_wrapper or unwrapping.is_redirected(module, forward):
            return output
        for inner in self.calls[first:]:
            inner.discarded = True
        del self.calls[first:]
        return self._end(call, output)

    def _is_computed_again(self, module: nn.Module) -> bool:
        """Return whether a checkpoint inside a recorded call runs ``module`` again in the backward pass."""
        if not in_backward():
            return False
        return any(one is module for call in self.calls for one, _ in call.training)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrackedCall | None:
        self._number += 1
        try:
            self._observers.tell(lambda one: one.forward_begins(module, args, kwargs))
            return self._recorded(module, args, kwargs)
        except Exception as error:
            self._fail(module, error)
            return None

    def _recorded(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrackedCall:
        module = unwrapping.unwrapped(called)
        inputs = [one for one in _set_as_attributes(module) if not self._is_weight(one[-1])]
        devices = {one.device for one in (*tensors_in((args, kwargs)), *module.parameters())}
        recorded_args, recorded_kwargs = map_tensors((args, kwargs), _copy)
        frozen = [one for one in module.parameters() if _is_plain_frozen(one)]
        return TrackedCall(
            number=self._number,
            module=module,
            args=recorded_args,
            kwargs=recorded_kwargs,
            random=RandomState.now(devices, _generators(module)),
            autocast=AutocastState.now(one.type for one in devices if one.type != "meta"),
            default_dtype=torch.get_default_dtype(),
            training=tuple((one, one.training) for one in module.modules()),
            buffers={**self._copied_buffers(module), **self._copied_moving(frozen)},
            frozen=tuple((one, _entries(one)) for one in frozen),
            nodes=tuple(one.grad_fn for one in tensors_in((args, kwargs)) if one.grad_fn is not None),
            compiled=unwrapping.is_compiled(called),
            collectives=collectives(),
            activations=tuple(self._activations((args, kwargs, [one for *_, one in inputs]))),
            set_inputs=tuple((attributes, name, _copy(one)) for attributes, name, one in inputs),
        )

    def _activations(self, given: Any) -> Iterator[Activation]:
        for one in tensors_in(given):
            leaf = received_leaf(one) if one.requires_grad else None
            if leaf is not None:
                yield self._activation(leaf)

    def _activation(self, leaf: Tensor) -> Activation:
        """Return the activation of a leaf, one for all that is computed from it: its gradient arrives once."""
        values, waiting = sample(leaf), self._waiting(leaf)
        found = next((own for own, _ in waiting if torch.equal(own.sample, values)), None)
        if found is None:
            found = Activation(values)
            register: Any = leaf.register_hook
            waiting = [*waiting, (found, register(partial(self._arrived, found)))]
        self._arrivals[leaf] = waiting
        return found

    def _waiting(self, received: Tensor) -> list[tuple[Activation, Any]]:
        """Return the activations of a tensor whose gradient has not arrived, and unhook the others.

        Pipelines receive each activation in the memory of an earlier one, whose gradient has arrived by then. The next
        gradient is not that of the earlier one.
        """
        known = self._arrivals.get(received, [])
        for activation, hook in known:
            if activation.gradients:
                hook.remove()
        return [(activation, hook) for activation, hook in known if not activation.gradients]

    def _arrived(self, activation: Activation, gradient: Tensor) -> None:
        number = self._current_pass()
        if number is not None and gradient is not None:
            before = activation.gradients.get(number)
            activation.gradients[number] = gradient.detach().clone() if before is None else before + gradient.detach()

    def _copied_buffers(self, module: nn.Module) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the buffers and copies of them, by identity; a buffer is copied again only after a change."""
        copies = {}
        for buffer in nn.Module.buffers(module):
            if is_lazy(buffer):
                continue
            _, version, copy = self._buffers.get(id(buffer), (buffer, -1, buffer))
            if version != buffer._version or not _equal(buffer, copy):  # ``buffer.data.copy_`` leaves the version
                copy = buffer.detach().clone()
                self._buffers[id(buffer)] = buffer, buffer._version, copy
            copies[id(buffer)] = buffer, copy
        return copies

    def _copied_moving(self, frozen: Sequence[nn.Parameter]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return those of the module's frozen parameters that its forward has changed before, and copies of them."""
        return {id(one): (one, one.detach().clone()) for one in frozen if id(one) in self._moving}

    def _end(self, call: TrackedCall | None, output: Any) -> Any:
        if call is None:
            return output
        try:
            self._observers.tell(lambda one: one.forward_ends())
            self._moving.update({id(one): one for one, before in call.frozen if not _equal(_entries(one), before)})
            call.frozen = ()
            outputs = differentiable(output)
            if not outputs:
                return output
            self._note_parameters(call)
            call.collectives = since(call.collectives)
            call.outputs = tuple(sample(one) for one in outputs)
            call.runs_code = runs_own_code(outputs)
            call.scalars = _scalars(output, outputs)
            aliases = dict(zip(map(id, outputs), alias(call, call.nodes, self._received, outputs), strict=True))
            call.nodes = ()
            call.graph = _reference(next(iter(aliases.values())))
            self.calls.append(call)
            return map_tensors(output, lambda one: aliases.get(id(one), one))
        except Exception as error:
            self._fail(call.module, error)
            return output

    def _fail(self, module: nn.Module, error: Exception) -> None:
        why = f"a call of {type(module).__name__} cannot be recorded: {type(error).__name__}: {error}"
        self.unrecorded.update(dict.fromkeys(module.parameters(), why))

    @staticmethod
    def _note_parameters(call: TrackedCall) -> None:
        sharded: dict[int, Any] = shards(call.module)
        units = flat_units(call.module)
        stand_ins = {one for unit in units for one in unit.stand_ins()}
        parameters = [sharded.get(id(one), one) for one in call.module.parameters() if id(one) not in stand_ins]
        parameters += [one for unit in units for one in unit.parameters]
        own = {*map(id, parameters), *sharded, *stand_ins}
        call.parameters = tuple(UsedParameter.of(one) for one in parameters)
        given = (one for one in tensors_in((call.args, call.kwargs)) if isinstance(one, nn.Parameter))
        call.foreign = tuple(one for one in given if id(one) not in own)
        # Trainable shards that FSDP2 does not unshard are gathered by the script, and their gradients arrive in parts.
        frozen = (one for one in shards_of_fsdp2([call.module]) if not one.requires_grad)
        known = {*map(id, sharded.values()), *map(id, frozen)}
        call.is_distributed = any(is_distributed(one) and id(one) not in known for one in parameters) or any(
            is_distributed(leaf) for _, leaf in arrival_leaves([call.module])
        )
        call.obstacle = _obstacle(call, parameters)

    def _received(self, call: TrackedCall, cotangents: tuple[Tensor | None, ...]) -> None:
        number = self._current_pass()
        if call.discarded:
            return
        if torch.is_grad_enabled():
            call.obstacle = SECOND_ORDER
        if number is None:
            return
        # Pipeline stages may receive the next gradients in the same memory, and collectives in a backward change them.
        copied = any(call.collectives.values()) or number in self._begun_inside
        known = [None if one is None else one.detach() for one in cotangents]
        new = tuple(one.clone() if one is not None and copied else one for one in known)
        old = call.cotangents.get(number)
        call.cotangents[number] = new if old is None else tuple(map(_sum, old, new))


def _is_plain_frozen(one: nn.Parameter) -> bool:
    return not one.requires_grad and type(one) is nn.Parameter and part_of(one) is None and not is_lazy(one)


def _entries(frozen: nn.Parameter) -> Tensor:
    """Return copies of some entries: a write through ``.data`` leaves the version, so only values show it."""
    if not frozen.dim() or not frozen.numel():
        return frozen.detach().clone()
    rows = frozen.detach()[:ROWS]
    while rows.dim() > 1:
        rows = rows.select(-1, 0)
    return rows.clone()


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    try:
        return torch.equal(local(one), local(other))
    except NotImplementedError:  # of sparse and meta tensors, of which only the versions can be compared
        return True


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors in the output of a module that require a gradient."""
    return [one for one in tensors_in(output) if one.requires_grad]


def _scalars(output: Any, outputs: Sequence[Tensor]) -> dict[int, str | int]:
    """Return, by its place in ``outputs``, the key, field or index in ``output`` of each single-number tensor."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        parts = output.items()
    elif hasattr(output, "_asdict"):
        parts = output._asdict().items()
    elif isinstance(output, (list, tuple)):
        parts = enumerate(output)
    elif not isinstance(output, Tensor) and hasattr(output, "__dict__"):
        parts = vars(output).items()
    named = {id(one): name for name, one in parts if isinstance(one, Tensor) and one.numel() == 1}
    return {index: named[id(one)] for index, one in enumerate(outputs) if id(one) in named}


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that requires a gradient if ``tensor`` does; or a parameter itself, which is replaced later."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _set_as_attributes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the attributes of a module and its submodules that are activations, as Megatron sets a stage's inputs."""
    for one in module.modules():
        for name, value in vars(one).items():
            if isinstance(value, Tensor) and value.requires_grad and _is_leaf(value):
                yield vars(one), name, value


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # one of several views whose base was changed in place, such as those that FSDP1 sets
        return False


def _generators(module: nn.Module) -> list[torch.Generator]:
    values = (value for one in module.modules() for value in vars(one).values())
    return list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())


def _obstacle(call: TrackedCall, parameters: Iterable[Tensor]) -> str:
    units = flat_units(call.module)
    if any(one.is_stale for one in units):
        return STALE
    if not all(one.is_of_all_ranks for one in units):
        return FLAT_PARTS
    if call.is_distributed:
        return "its parameters are DTensors that `fully_shard` did not create"
    if any(not one.is_leaf for one in parameters):
        return "its parameters are computed from other tensors"
    return ""


def _reference(tensor: Tensor) -> Any:
    return weakref.ref(tensor.grad_fn)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _is_transformed() -> bool:
    """Return whether a torch.func transform or a tracer is running, in which tensors are not ordinary ones."""
    tracing: bool = torch._C._get_tracing_state() is not None
    return tracing or torch._C._functorch.peek_interpreter_stack() is not None
