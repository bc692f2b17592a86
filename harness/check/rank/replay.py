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

from harness.check.rank.autocast_state import autocast
from harness.check.rank.call import TrackedCall, sample
from harness.check.rank.draws import Draws, UnknownDrawError
from harness.check.rank.module_state import ModuleState
from harness.check.rank.nested import map_tensors
from harness.check.rank.precision import Precision, double_of, to_float64
from harness.check.rank.random_state import drawn_from
from harness.check.rank.replay_modes import Float64Mode, NativeMode
from harness.check.rank.tracked_calls import differentiable
from harness.check.rank.uses import is_reentrant, leaves_of

ReceiveGradient = Callable[[int, nn.Parameter, Tensor], None]
"""Takes the number of a backward pass, a parameter and its gradient, which is freed when it returns."""


class CannotReplayError(Exception):
    """A call cannot be run again; the message says why."""


@dataclass(frozen=True)
class Replayed:
    """What a replay gave: samples of its outputs, the dtypes of its random draws, and parameters that are not its own.

    ``drawn`` is None in float64. ``hidden`` has the parameters that the call used although they are not its module's.
    """

    outputs: tuple[Tensor, ...]
    drawn: list[torch.dtype] | None
    hidden: tuple[Tensor, ...]


class Replicas:
    """Leaves that stand for the parameters in replays of one precision: float64 copies, or the same memory."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def of(self, parameter: nn.Parameter, *, requires_grad: bool) -> nn.Parameter:
        """Return the leaf for a parameter, the same one each time."""
        if id(parameter) not in self._copies:
            values = to_float64(parameter) if self._precision is Precision.FLOAT64 else parameter.detach()
            leaf = nn.Parameter(values, requires_grad=False)
            vars(leaf).update(vars(parameter))
            self._copies[id(parameter)] = parameter, leaf
        leaf = self._copies[id(parameter)][1]
        leaf.requires_grad_(requires_grad)
        return leaf


def replay(
    call: TrackedCall,
    precision: Precision,
    receive: ReceiveGradient,
    replicas: Replicas,
    drawn: list[torch.dtype] | None = None,
) -> Replayed:
    """Run ``call`` again and give ``receive`` the gradient of each parameter, for each backward pass through the call.

    ``replicas`` belong to the same precision. ``drawn`` has the dtypes of its random draws as a replay in the
    training's own precision found them, None where there was none yet. Module, generators, gradients and everything
    else are afterwards what they were before.

    Raises:
        CannotReplayError: where the call cannot be run again.
        UnknownDrawError: where it has to be run in the training's own precision first.
    """
    _check(call)
    leaves = {
        id(one.parameter): (one.parameter, replicas.of(one.parameter, requires_grad=one.requires_grad))
        for one in call.parameters
    }
    state = ModuleState(call.module)
    try:
        with _conditions(call, precision), _mode(call, precision, drawn) as mode:
            state.exchange(_replacement(call, precision, leaves))
            for module, training in call.training:
                vars(module)["training"] = training
            return _run(call, precision, leaves, receive, mode)
    except (CannotReplayError, UnknownDrawError):
        raise
    except torch.OutOfMemoryError as error:
        raise CannotReplayError(
            f"{call.name}: there is not enough memory to run it again in {precision.value}"
        ) from error
    except Exception as error:
        raise CannotReplayError(
            f"{call.name}: running it again in {precision.value} failed: {_sentence(error)}"
        ) from error
    finally:
        state.restore()


def _check(call: TrackedCall) -> None:
    if call.obstacle:
        raise CannotReplayError(f"{call.name}: {call.obstacle}")
    if any(one.changed for one in call.parameters):
        raise CannotReplayError(f"{call.name}: its parameters were changed between its forward and the optimizer step")


def _replacement(
    call: TrackedCall, precision: Precision, leaves: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> Callable[[Tensor], Tensor]:
    """Return what a tensor is replaced by: leaves for parameters, the recorded buffers, copies of everything else."""
    cast = to_float64 if precision is Precision.FLOAT64 else _clone

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) in leaves:
            return leaves[id(tensor)][1]
        if id(tensor) in call.buffers:
            return cast(call.buffers[id(tensor)][1])
        copy = cast(tensor)
        return copy.requires_grad_().view_as(copy) if tensor.requires_grad else copy

    return replacement


def _run(
    call: TrackedCall,
    precision: Precision,
    leaves: dict[int, tuple[nn.Parameter, nn.Parameter]],
    receive: ReceiveGradient,
    mode: NativeMode | Float64Mode,
) -> Replayed:
    replacement = _replacement(call, precision, leaves)
    args, kwargs = map_tensors((call.args, call.kwargs), replacement)
    outputs = differentiable(call.module(*args, **kwargs))
    if len(outputs) != len(call.outputs):
        raise CannotReplayError(
            f"{call.name}: run again, it gave {len(outputs)} outputs, {len(call.outputs)} in training"
        )
    samples = tuple(sample(one) for one in outputs)
    known = {id(leaf) for _, leaf in leaves.values()}
    hidden = tuple(one for one in leaves_of(outputs) if id(one) not in known and isinstance(one, nn.Parameter))
    with _gradients_kept(hidden):
        _differentiate(call, outputs, list(leaves.values()), receive)
    return Replayed(samples, mode.drawn if isinstance(mode, NativeMode) else None, hidden)


def _differentiate(
    call: TrackedCall,
    outputs: Sequence[Tensor],
    leaves: list[tuple[nn.Parameter, nn.Parameter]],
    receive: ReceiveGradient,
) -> None:
    wanted = [(parameter, leaf) for parameter, leaf in leaves if leaf.requires_grad]
    passes = sorted(call.cotangents)
    for number in passes:
        given = [(one, v) for one, v in zip(outputs, call.cotangents[number], strict=True) if v is not None]
        if not given:
            continue
        with _received(wanted, number, receive):
            _backward(
                [one for one, _ in given],
                [v.to(one.dtype) for one, v in given],
                keep=number != passes[-1],
                inputs=[] if is_reentrant(outputs) else [leaf for _, leaf in wanted],
            )


def _backward(outputs: list[Tensor], cotangents: list[Tensor], *, keep: bool, inputs: list[Tensor]) -> None:
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
def _conditions(call: TrackedCall, precision: Precision) -> Iterator[None]:
    """Provide what a forward depends on beside its module, and keep what it prints to itself."""
    native = precision is Precision.NATIVE
    default = call.default_dtype if native else double_of(call.default_dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(drawn_from(call.random))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_default_dtype(default))
        stack.enter_context(autocast(call.autocast, enabled=native))
        stack.enter_context(_eager())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def _mode(call: TrackedCall, precision: Precision, drawn: list[torch.dtype] | None) -> NativeMode | Float64Mode:
    if precision is Precision.NATIVE:
        return NativeMode()
    return Float64Mode(Draws(drawn, _usual_draw(call), call.default_dtype))


def _usual_draw(call: TrackedCall) -> torch.dtype | None:
    """Return the one precision in which a module can draw, None where it computes in several."""
    dtypes = {one.parameter.dtype for one in call.parameters}
    if len(dtypes) != 1 or any(one.enabled for one in call.autocast):
        return None
    return dtypes.pop()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Let compiled functions run as they are written. Before torch 2.6 they run compiled."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
