"""Runs a recorded call again and differentiates it: the exact local gradient, from the call's own inputs."""

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
from plumbline.replay.autocast_state import autocast
from plumbline.replay.call import TrackedCall, sample
from plumbline.replay.compiled_draws import CompiledDraws
from plumbline.replay.derivatives import Constants, custom_functions
from plumbline.replay.draws import Draws, UnknownDrawError
from plumbline.replay.forward_draws import DrawsInBackwardError, ForwardDraws
from plumbline.replay.function_derivatives import Terms
from plumbline.replay.module_state import ModuleState
from plumbline.replay.nested import map_tensors
from plumbline.replay.parameter_copies import ParameterCopies
from plumbline.replay.precision import ReplayPrecision, default_dtype
from plumbline.replay.random_state import drawn_from
from plumbline.replay.reasons import COMMUNICATES
from plumbline.replay.replay_modes import CommunicatesError, NativeMode, Rounding, WideMode
from plumbline.replay.tracked_calls import differentiable
from plumbline.replay.unsharding import is_freed, place_flat, replace_forwards, replace_hooks
from plumbline.replay.uses import Graph

ReceiveGradient = Callable[[int, nn.Parameter, Tensor], None]
"""Takes the number of a backward pass, a parameter and its gradient, which is freed when it returns."""

Leaves = Sequence["tuple[nn.Parameter, nn.Parameter]"]
"""Parameters, each with the leaf that stands for it in a replay."""


class CannotReplayError(Exception):
    """A call cannot be run again; the message says why."""


class NeedsAllRanksError(CannotReplayError):
    """A call communicates with other ranks."""


class FailedReplayError(CannotReplayError):
    """A call failed, or found no memory left, before it came to communicate. It may succeed on other ranks."""


@dataclass(frozen=True)
class Replayed:
    """What a replay gave: samples of its outputs, the dtypes of its random draws, and parameters that are not its own.

    ``drawn`` is None but for a native replay. ``hidden`` has the parameters that the call used
    although they are not its module's.
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

    Where ``receive`` is None the call goes backward only if that may draw random numbers, as a checkpoint's does.
    ``copies`` belong to the same precision. ``drawn`` has the dtypes of its random draws as a replay in the
    training's own precision found them, None where there was none yet. ``forward_draws``: modules that a backward pass
    runs again draw what they drew in the forward. ``compiled`` draws in place of operators. Module, generators,
    gradients and everything else are afterwards what they were before.

    Raises:
        CannotReplayError: where the call cannot be run again.
        UnknownDrawError: where it has to be run in the training's own precision first.
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
        # All ranks could replay together, if they knew from each other that they recorded the same calls.
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
    """Run ``call`` again while all other ranks run theirs, and return its outputs and the dtypes of its random draws.

    Its collectives run. See ``replay`` for the first arguments. ``constants`` are values without a gradient, to be
    recorded or to be used again, ``rounding`` has errors for the result of each operator. ``verify``: refuse a forward
    that defines a derivative of its own. ``exchanged`` takes what is known of functions that communicate.

    Raises:
        UnknownDrawError: where it has to be run in the training's own precision first.
        OwnDerivativeError: it defines a derivative of its own.
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
    """Run ``call`` again, with the calls of all modules in it sent through ``called``. See ``replay``.

    ``then`` is given the outputs, and may differentiate them. Returns the dtypes of its random draws if ``precision``
    is the training's own.

    Raises:
        Exception: it cannot be run again.
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
    if any(one.changed for one in call.parameters):
        raise CannotReplayError(f"{call.name}: its parameters were changed between its forward and the optimizer step")


def _replacement(
    call: TrackedCall, precision: ReplayPrecision, leaves: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> Callable[[Tensor], Tensor]:
    """Return what a tensor is replaced by: leaves for parameters, the recorded buffers, copies of everything else."""

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) in leaves:
            return leaves[id(tensor)][1]
        if id(tensor) in call.buffers:
            before = call.buffers[id(tensor)][1].to(tensor.dtype)  # to which FSDP1 casts it in its first forward
            return precision.copy(before)
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
    """Go backward through the call for each pass, to ``chosen`` leaves: all if [], as reentrant checkpoints need it."""
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
    """Run the engine itself: ``torch.autograd.backward`` counts as a backward pass of the script."""
    run = Variable._execution_engine.run_backward
    run(tuple(outputs), tuple(cotangents), keep, False, tuple(inputs), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Leave the gradients of parameters as they are, which a backward pass without inputs would add to."""
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
    """Hand each gradient on as soon as it is complete, and free it."""

    def hand_on(parameter: nn.Parameter) -> Callable[[Tensor], None]:
        def hook(leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                receive(number, parameter, gradient)

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
    """Provide what a forward depends on beside its module, and keep what it prints to itself."""
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
    """Return the one precision in which a module can draw, None where it computes in several."""
    dtypes = {dtype for one in call.parameters for dtype in (one.parameter.dtype, one.dtype)}
    if len(dtypes) != 1 or any(one.enabled for one in call.autocast):
        return None
    return dtypes.pop()


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Let compiled functions run as they are written. Before torch 2.6 they run compiled."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
