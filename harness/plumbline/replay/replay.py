"""Runs a recorded call again from its own inputs and differentiates it, which gives the exact local gradient."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from plumbline.devices.calls import OutOfMemoryError
from plumbline.recording.module_calls import Called, ModuleCalls
from plumbline.replay.call import TrackedCall, sample
from plumbline.replay.derivatives import Constants, custom_functions
from plumbline.replay.draws import CompiledDraws, Draws, DrawsInBackwardError, ForwardDraws, UnknownDrawError
from plumbline.replay.function_derivatives import Terms
from plumbline.replay.nested import map_tensors
from plumbline.replay.parameter_copies import ModuleState, ParameterCopies
from plumbline.replay.precision import ReplayPrecision, default_dtype
from plumbline.replay.random_state import autocast, drawn_from
from plumbline.replay.reasons import COMMUNICATES
from plumbline.replay.replay_modes import CommunicatesError, NativeMode, Rounding, WideMode
from plumbline.replay.tracked_calls import differentiable
from plumbline.replay.unsharding import is_freed, place_flat, replace_forwards, replace_hooks
from plumbline.replay.uses import Graph

ReceiveGradient = Callable[[int, nn.Parameter, Tensor], None]
"""Called with the number of a backward pass, a parameter and its gradient, which is freed afterwards."""

Leaves = Sequence["tuple[nn.Parameter, nn.Parameter]"]
"""Parameters, each with the leaf that replaces it in a replay."""


class CannotReplayError(Exception):
    """A call cannot be run again; the message says why."""


class NeedsAllRanksError(CannotReplayError):
    """A call communicates with other ranks."""


class FailedReplayError(CannotReplayError):
    """A replay failed, or ran out of memory, before it communicated. It may succeed on other ranks."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay: samples of its outputs, and the dtypes of its random draws.

    ``drawn`` is None except for a native replay. ``hidden`` has the parameters that the call used although they do not
    belong to its module.
    """

    outputs: tuple[Tensor, ...]
    drawn: list[torch.dtype] | None
    hidden: tuple[Tensor, ...]


def replay(
    call: TrackedCall,
    precision: ReplayPrecision,
    receive: ReceiveGradient | None,
    copies: ParameterCopies,
    drawn: list[torch.dtype] | None = None,
    *,
    forward_draws: bool = False,
    compiled: CompiledDraws | None = None,
) -> Replayed:
    """Run ``call`` again and give ``receive`` the gradient of each parameter, for each backward pass through the call.

    If ``receive`` is None, the backward pass runs only if it may draw random numbers, as with an activation checkpoint.
    ``copies`` have the same precision. ``drawn`` has the dtypes of the random draws from a replay in the training's own
    precision, None if there was none yet. ``forward_draws``: modules that a backward pass runs again repeat the draws
    of the forward. ``compiled`` draws in place of operators. Afterwards the module, the generators, the gradients and
    everything else are restored.

    Raises:
        CannotReplayError: The call cannot be run again.
        UnknownDrawError: The call has to be run in the training's own precision first.
    """
    _check(call)
    leaves = copies.leaves(call)
    own = list({id(leaf): (parameter, leaf) for parameter, leaf in leaves.values()}.values())
    chosen = [leaf for parameter, leaf in own if leaf.requires_grad and copies.keeps(parameter)]
    state, mode = copies.state(call.module), _mode(call, precision, drawn, compiled)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_conditions(call, precision, mode))
            if forward_draws:
                stack.enter_context(_repeated_draws(mode))
            if compiled is not None:
                stack.enter_context(compiled.followed())
            return _run(call, state, _replacement(call, precision, leaves), own, chosen, receive, mode)
    except (CannotReplayError, UnknownDrawError):
        raise
    except CommunicatesError as error:
        # All ranks could replay together, if they knew that they have recorded the same calls.
        raise NeedsAllRanksError(f"{call.name}: {COMMUNICATES}") from error
    except DrawsInBackwardError as error:
        raise CannotReplayError(f"{call.name}: its backward pass draws its own random numbers") from error
    except OutOfMemoryError as error:
        raise FailedReplayError(f"{call.name}: no memory is left to run it again in {precision.value}") from error
    except Exception as error:
        why = f"{call.name}: running it again in {precision.value} failed: {_sentence(error)}"
        raise FailedReplayError(why) from error
    finally:
        state.restore()


def forward_together(
    call: TrackedCall,
    precision: ReplayPrecision,
    copies: ParameterCopies,
    drawn: list[torch.dtype] | None = None,
    constants: Constants | None = None,
    rounding: Rounding | None = None,
    *,
    verify: bool = False,
    exchanged: Callable[[str, Terms], None] | None = None,
) -> tuple[list[Tensor], list[torch.dtype] | None]:
    """Run ``call`` again on all ranks together; return its outputs and, for a native replay, the dtypes of its draws.

    Its collectives run. See ``replay`` for the first arguments. ``constants`` records or reuses values without a
    gradient. ``rounding`` adds an error to the result of each operator. ``verify``: raise an error if the forward
    defines a derivative of its own. ``exchanged`` receives the derivative's terms of functions that communicate.

    Raises:
        UnknownDrawError: The call has to be run in the training's own precision first.
        OwnDerivativeError: The forward defines a derivative of its own.
    """
    leaves = copies.leaves(call)
    state, mode = copies.state(call.module), _mode(call, precision, drawn)
    mode.may_communicate = True
    functions: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(mode, WideMode) and constants is not None:
        mode.rounding, mode.constants = rounding, constants
        functions = custom_functions(constants, verify=verify, exchanged=exchanged)
    try:
        with _conditions(call, precision, mode), functions:
            outputs = _forward(call, state, _replacement(call, precision, leaves), mode)
            if verify and constants is not None:
                constants.gradients.keep_reached(outputs)
            return [one.detach() for one in outputs], mode.drawn if isinstance(mode, NativeMode) else None
    finally:
        state.restore()


def forward_watched(
    call: TrackedCall,
    precision: ReplayPrecision,
    copies: ParameterCopies,
    called: Called,
    drawn: list[torch.dtype] | None = None,
    then: Callable[[Sequence[Tensor]], None] | None = None,
) -> list[torch.dtype] | None:
    """Run ``call`` again, and route the calls of all modules in it through ``called``. See ``replay``.

    ``then`` is called with the outputs, and may differentiate them. Returns the dtypes of the random draws if
    ``precision`` is the training's own.

    Raises:
        Exception: The call cannot be run again.
    """
    _check(call)
    leaves = copies.leaves(call)
    state, mode, calls = copies.state(call.module), _mode(call, precision, drawn), ModuleCalls(called)
    calls.install()
    try:
        with _conditions(call, precision, mode):
            outputs = _forward(call, state, _replacement(call, precision, leaves), mode)
            runs_code = mode.saves_with_hooks or mode.computes_otherwise
            with mode if runs_code else contextlib.nullcontext():
                if then is not None:
                    then(outputs)
        return mode.drawn if isinstance(mode, NativeMode) else None
    finally:
        calls.remove()
        state.restore()


def _check(call: TrackedCall) -> None:
    if call.obstacle:
        raise CannotReplayError(f"{call.name}: {call.obstacle}")
    if call.is_changed:
        raise CannotReplayError(f"{call.name}: its parameters were changed between its forward and the optimizer step")


def _replacement(
    call: TrackedCall, precision: ReplayPrecision, leaves: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> Callable[[Tensor], Tensor]:
    """Return a function that replaces tensors: parameters by leaves, buffers by recorded ones, all others by copies."""

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) in call.buffers:
            before = call.buffers[id(tensor)][1].to(tensor.dtype)  # FSDP1 casts buffers in its first forward
            copy = precision.copy(before)
            return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
        if id(tensor) in leaves:
            return leaves[id(tensor)][1]
        if is_freed(tensor):
            return tensor
        copy = precision.copy(tensor)
        return copy.requires_grad_().view_as(copy) if tensor.requires_grad else copy

    return replacement


def _run(
    call: TrackedCall,
    state: ModuleState,
    replacement: Callable[[Tensor], Tensor],
    leaves: Leaves,
    chosen: list[nn.Parameter],
    receive: ReceiveGradient | None,
    mode: NativeMode | WideMode,
) -> Replayed:
    outputs = _forward(call, state, replacement, mode)
    samples, graph = tuple(sample(one) for one in outputs), Graph.of(outputs)
    known = {id(leaf) for _, leaf in leaves}
    hidden = tuple(one for one in graph.leaves if id(one) not in known and isinstance(one, nn.Parameter))
    runs_code = mode.saves_with_hooks or graph.runs_code
    if (receive is not None and chosen) or runs_code:
        with _gradients_kept(hidden), mode if runs_code or mode.computes_otherwise else contextlib.nullcontext():
            _differentiate(call, outputs, leaves, receive or _ignored, [] if graph.is_reentrant else chosen)
    return Replayed(samples, mode.drawn if isinstance(mode, NativeMode) else None, hidden)


def _forward(
    call: TrackedCall, state: ModuleState, replacement: Callable[[Tensor], Tensor], mode: NativeMode | WideMode
) -> list[Tensor]:
    with mode:
        state.exchange(replacement)
        for attributes, name, value in call.set_inputs:
            attributes[name] = replacement(value)
        for module, training in call.training:
            vars(module)["training"] = training
        place_flat(call.module, replacement)
        replace_hooks(module for module, _ in call.training)
        replace_forwards(module for module, _ in call.training)
        args, kwargs = map_tensors((call.args, call.kwargs), replacement)
        outputs = differentiable(call.module(*args, **kwargs))
    if len(outputs) != len(call.outputs):
        why = f"its forward returned {len(outputs)} outputs instead of {len(call.outputs)} when it was run again"
        raise CannotReplayError(f"{call.name}: {why}")
    return outputs


def _differentiate(
    call: TrackedCall, outputs: Sequence[Tensor], leaves: Leaves, receive: ReceiveGradient, chosen: list[nn.Parameter]
) -> None:
    """Run each backward pass through the call, to ``chosen`` leaves; [] means all, which reentrant checkpoints need."""
    wanted = [(parameter, leaf) for parameter, leaf in leaves if leaf.requires_grad]
    given = {
        number: [(one, v) for one, v in zip(outputs, cotangents, strict=True) if v is not None]
        for number, cotangents in sorted(call.cotangents.items())
    }
    given = {number: pairs for number, pairs in given.items() if pairs}
    for number, pairs in given.items():
        with _received(wanted, number, receive):
            _backward(
                [one for one, _ in pairs],
                [v.to(one.dtype) for one, v in pairs],
                keep=number != max(given),
                inputs=chosen,
            )


def _ignored(number: int, parameter: nn.Parameter, gradient: Tensor) -> None:
    pass


def _backward(outputs: list[Tensor], cotangents: list[Tensor], *, keep: bool, inputs: Sequence[Tensor]) -> None:
    """Run the engine directly: ``torch.autograd.backward`` would count as a backward pass of the script."""
    run = Variable._execution_engine.run_backward
    run(tuple(outputs), tuple(cotangents), keep, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Preserve the gradients of parameters, to which a backward pass without ``inputs`` would add."""
    before = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in zip(parameters, before, strict=True):
            one.grad = gradient


@contextlib.contextmanager
def _received(wanted: list[tuple[nn.Parameter, nn.Parameter]], number: int, receive: ReceiveGradient) -> Iterator[None]:
    """Pass each gradient to ``receive`` as soon as it is complete, and free it."""

    def hand_on(parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def hook(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                receive(number, parameter, gradient.to_dense() if gradient.is_sparse else gradient)

        return hook

    handles = [
        leaf.register_post_accumulate_grad_hook(hand_on(parameter))  # type: ignore[no-untyped-call]
        for parameter, leaf in wanted
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for _, leaf in wanted:
            leaf.grad = None


@contextlib.contextmanager
def _conditions(call: TrackedCall, precision: ReplayPrecision, mode: NativeMode | WideMode) -> Iterator[None]:
    """Set everything that a forward depends on in addition to its module, and suppress its output."""
    native = precision is ReplayPrecision.NATIVE
    default = precision.wide(call.default_dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(drawn_from(call.random))
        stack.callback(mode.put_back)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(default_dtype(default))
        stack.enter_context(autocast(call.autocast, enabled=native))
        stack.enter_context(_eager())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


@contextlib.contextmanager
def _repeated_draws(mode: NativeMode | WideMode) -> Iterator[None]:
    mode.forward_draws = ForwardDraws()
    with mode.forward_draws:
        yield


def _mode(
    call: TrackedCall,
    precision: ReplayPrecision,
    drawn: list[torch.dtype] | None,
    compiled: CompiledDraws | None = None,
) -> NativeMode | WideMode:
    if precision is ReplayPrecision.NATIVE:
        return NativeMode(compiled)
    return WideMode(precision, Draws(precision, drawn, _usual_draw(call), call.default_dtype, compiled))


def _usual_draw(call: TrackedCall) -> torch.dtype | None:
    """Return the only dtype in which a module can draw, None if it computes in several."""
    dtypes = {dtype for one in call.parameters for dtype in (one.parameter.dtype, one.dtype)}
    if len(dtypes) != 1 or any(one.enabled for one in call.autocast):
        return None
    return dtypes.pop()


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Run compiled functions eagerly. Before torch 2.6 they run compiled."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
