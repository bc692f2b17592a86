"""Steps a twin: a copy of an optimizer with copies of some parameters, in their own precision or all in float64."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plumbline.recording.sharding import local

_IMPLEMENTATIONS = ("fused", "foreach", "capturable")
"""Options that choose among implementations of the same step."""

_OF_ITS_OWN = frozenset({"step", "state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
"""Attributes of an optimizer that a twin does not take over."""

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types whose values no step can change."""

_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


def norm_in_float64(tensor: Tensor) -> float:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide).real)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all entries of this rank's part of a tensor are finite."""
    own = local(tensor.detach())
    own = own._values() if own.is_sparse else own
    if not (own.is_floating_point() or own.is_complex()):  # such as quantized weights
        return True
    # A norm is far cheaper to compute, but it can overflow.
    return math.isfinite(float(torch.linalg.vector_norm(own))) or bool(own.isfinite().all())


@dataclass(frozen=True, eq=False)
class StepInput:
    """The input of an optimizer's step for one parameter. ``gradient``: None if the parameter has none."""

    weights: Tensor
    gradient: Any
    state: Mapping[str, Any] | None = field(default_factory=dict)

    @staticmethod
    def of(optimizer: Optimizer, parameter: Tensor) -> StepInput:
        """Return this rank's part of a parameter, which has a gradient."""
        assert parameter.grad is not None
        own = state_of(optimizer, parameter)
        state = None if own is None else map_state(own, local)
        return StepInput(local(parameter.detach()), local(parameter.grad.detach()), state)

    @staticmethod
    def joined(inputs: Sequence[StepInput]) -> StepInput | None:
        """Return the input for all entries as one parameter, to save operations; None if their states do not allow it.

        This is right only if the optimizer updates each entry by itself.
        """
        kinds = {(one.weights.dtype, one.weights.device, one.gradient.dtype, *(one.state or {})) for one in inputs}
        if len(inputs) == 1 or len(kinds) > 1 or any(one.gradient.is_sparse or not one.weights.dim() for one in inputs):
            return None
        state = {key: _joined(inputs, [(one.state or {})[key] for one in inputs]) for key in inputs[0].state or {}}
        if any(one is None for one in state.values()):
            return None
        weights = torch.cat([one.weights.reshape(-1) for one in inputs])
        gradient = torch.cat([one.gradient.reshape(-1) for one in inputs])
        return StepInput(weights, gradient, state)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StepInput:
        state = None if self.state is None else map_state(self.state, change)
        return replace(self, weights=change(self.weights), gradient=change(self.gradient), state=state)


def _joined(inputs: Sequence[StepInput], values: Sequence[Any]) -> Any:
    """Return the joined value of a state; None if the values can be neither joined nor shared."""
    first = values[0]
    if all(isinstance(one, Tensor) for one in values):
        is_like_weights = all(one.shape == each.weights.shape for one, each in zip(values, inputs, strict=True))
        if is_like_weights and all(one.dtype == first.dtype for one in values):
            return torch.cat([one.reshape(-1) for one in values])
        same = all(one.dim() == 0 and one == first for one in values)
    else:
        same = all(type(one) in _CONSTANTS and one == first for one in values)
    return first if same else None


Inputs = Sequence[tuple[dict[str, Any], Sequence[StepInput]]]
"""The groups of an optimizer, each with the input of the step for its parameters."""


class Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to a lower precision into casts to float64, and makes new tensors of the default dtype in float64.

    ``lowered``: whether any cast was to 16 bits.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lowered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype in _WIDER:
            self.lowered |= dtype in (torch.float16, torch.bfloat16)
            kwargs["dtype"] = _WIDER[dtype]
        result = func(*args, **kwargs)
        is_new = dtype is None and not any(isinstance(one, Tensor) for one in tree_leaves((args, kwargs)))
        return result.to(_WIDER.get(result.dtype, result.dtype)) if is_new and isinstance(result, Tensor) else result


def stepped(optimizer: Optimizer, group: dict[str, Any], given: StepInput, **options: Any) -> Tensor:
    """Return the weights after one step of a twin of the optimizer that has one parameter. Options: ``stepped_all``."""
    return stepped_all(optimizer, [(group, [given])], **options)[0]


def stepped_all(
    optimizer: Optimizer,
    groups: Inputs,
    *,
    exact: bool = False,
    traced: bool = False,
    attributes: Callable[[str, Any], Any] | None = None,
    shared: Mapping[Any, Any] | None = None,
) -> list[Tensor]:
    """Return the weights of all parameters after one step of a twin of the optimizer.

    ``exact``: compute in float64. ``traced``: compute as compiled code does, in which the number of the step and values
    derived from it are float32 tensors instead of Python numbers; 1 - β₂ at the first step is then off by 3e-5.
    ``attributes`` is called with the name and the value of each attribute and option, and returns its replacement.
    ``shared``: the state that belongs to no parameter.
    """
    attributes = attributes or (lambda name, value: value)
    twin = object.__new__(type(optimizer))
    inherited = ((key, value) for key, value in vars(optimizer).items() if key not in _OF_ITS_OWN)
    own_values = {key: _copied_attribute(value, exact) for key, value in inherited}
    twin.__dict__.update({key: attributes(key, value) for key, value in own_values.items()})
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.param_groups = []
    twin.state = defaultdict(dict, _copied(shared or {}, exact))
    for group, inputs in groups:
        dtype = inputs[0].weights.dtype
        options = {key: attributes(key, value) for key, value in _options(group, dtype, exact).items()}
        if traced:
            options |= {key: False for key in _IMPLEMENTATIONS if key in options}
        twin.param_groups.append({**options, "params": [_own_parameter(twin, given, exact) for given in inputs]})
    parameters = [own for group in twin.param_groups for own in group["params"]]
    if (exact or traced) and not _unscaled(twin, [own.grad for own in parameters if own.grad is not None]):
        return [own.detach() for own in parameters]
    with _as_if_compiled() if traced else nullcontext():
        # Call the bare method: the hooks that torch and others wrap around it would count this as a training step.
        inspect.unwrap(type(optimizer).step)(twin)
    return [own.detach() for own in parameters]


def _own_parameter(twin: Optimizer, given: StepInput, exact: bool) -> torch.nn.Parameter:
    own = torch.nn.Parameter(_copied(given.weights, exact))
    own.grad = _copied(given.gradient, exact)
    if given.state is not None:
        twin.state[own] = {key: _copied(value, exact) for key, value in given.state.items()}
    return own


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run the script's compiled functions without compilation, so that their operations can be intercepted."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    with nullcontext() if set_stance is None else set_stance("force_eager"):
        yield


@contextmanager
def _as_if_compiled() -> Iterator[None]:
    """Let optimizers compute as under torch.compile, without tracing them."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def _unscaled(twin: Optimizer, gradients: Sequence[Tensor]) -> bool:
    """Divide by the loss scale as a fused optimizer would; return False if it would skip the step.

    GradScaler sets ``found_inf`` and ``grad_scale`` for the duration of a step (``_step_supports_amp_scaling``).
    """
    found, scale = (twin.__dict__.pop(name, None) for name in ("found_inf", "grad_scale"))
    if scale is not None:
        for gradient in gradients:
            gradient.div_(float(scale))
    return found is None or not float(found)


def _options(group: dict[str, Any], dtype: torch.dtype, exact: bool) -> dict[str, Any]:
    """Return a group's options. For float64, turn off implementations that only some dtypes and devices have."""
    options = {key: _copied(value, exact) for key, value in group.items() if key != "params"}
    if not exact:
        return options
    for key in (*_IMPLEMENTATIONS, "differentiable"):
        if options.get(key):
            options[key] = False
    epsilon = options.get("eps")
    if isinstance(epsilon, (tuple, list)) and epsilon and epsilon[0] is None:
        # Adafactor uses the machine epsilon of the parameter's dtype, and its copy has another dtype.
        options["eps"] = (torch.finfo(dtype).eps, *epsilon[1:])
    return options


def _own(value: Any) -> Any:
    """Return a copy that shares nothing that a step can change. Modules, process groups and meshes are shared."""
    if type(value) in _CONSTANTS or isinstance(value, torch.nn.Module) or is_of_ranks(value):
        return value
    return copy.deepcopy(value)


def _copied_attribute(value: Any, exact: bool) -> Any:
    if isinstance(value, Tensor):
        return _copied(value, exact)
    return _own(value) if is_plain(value) or is_of_ranks(value) else copy.copy(value)


def state_of(optimizer: Optimizer, parameter: Tensor, rank: int = 0, ranks: int = 1) -> Mapping[str, Any] | None:
    """Return the state of a parameter; None if this rank has none.

    The first parameter of a group can hold the state of all its parameters as one stack. Each of ``ranks`` ranks then
    has consecutive rows of it.
    """
    group = _group_of(optimizer, parameter)
    stack = optimizer.state.get(group[0], {})
    rows = -(-len(group) // ranks)
    if not _is_stack(stack, group, rows) or any(one in optimizer.state for one in group[1:]):
        return optimizer.state.get(parameter)
    number = next(index for index, one in enumerate(group) if one is parameter)
    if number // rows != rank:
        return None
    row = slice(number % rows, number % rows + 1)
    return {key: one[row] if isinstance(one, Tensor) and one.dim() else one for key, one in stack.items()}


def has_share(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether this rank has the state of only a part of a group, stacked in the state of its first parameter."""
    group = _group_of(optimizer, parameter)
    if any(one in optimizer.state for one in group[1:]):
        return False
    lengths = {len(one) for one in optimizer.state.get(group[0], {}).values() if isinstance(one, Tensor) and one.dim()}
    return any(size < len(group) and _is_stack(optimizer.state[group[0]], group, size) for size in lengths)


def _group_of(optimizer: Optimizer, parameter: Tensor) -> Sequence[Tensor]:
    groups = (each["params"] for each in optimizer.param_groups)
    return next((one for one in groups if _holds(one, parameter)), [parameter])


def _holds(parameters: Sequence[Tensor], parameter: Tensor) -> bool:
    return any(one is parameter for one in parameters)


def _is_stack(state: Mapping[str, Any], group: Sequence[Tensor], rows: int) -> bool:
    shape = group[0].shape
    tensors = [one for one in state.values() if isinstance(one, Tensor) and one.dim()]
    is_of_all = all(one.dim() == len(shape) + 1 and len(one) == rows for one in tensors)
    return is_of_all and any(one.shape[1:] == shape for one in tensors) and all(one.shape == shape for one in group)


def is_of_ranks(value: Any) -> bool:
    """Return whether a value is a process group or a device mesh."""
    c10d: Any = torch.distributed
    return bool(c10d.is_available()) and isinstance(value, (c10d.ProcessGroup, c10d.device_mesh.DeviceMesh))


def is_plain(value: Any) -> bool:
    """Return whether a value consists only of numbers, strings, dtypes, devices, and functions without a closure."""
    if type(value) in _CONSTANTS:
        return True
    if isinstance(value, FunctionType):
        return value.__closure__ is None and is_plain(value.__defaults__)
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, (*_CONSTANTS, BuiltinFunctionType))


def map_state(value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a state with each tensor changed, and everything else changed by ``other``."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_state(one, change, other) for one in value)
    if isinstance(value, dict):
        return {key: map_state(one, change, other) for key, one in value.items()}
    return other(value)


def _copied(value: Any, exact: bool) -> Any:
    """Return a copy of one value of a state; floating-point tensors in float64 if ``exact``."""

    def copied(tensor: Tensor) -> Tensor:
        own = tensor.detach()
        if exact and own.is_floating_point():
            return own.to(torch.float64, copy=True)
        return own.to(torch.complex128, copy=True) if exact and own.is_complex() else own.clone()

    return map_state(value, copied, _own)
