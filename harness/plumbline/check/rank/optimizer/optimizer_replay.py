"""Replays one optimizer step of one parameter on copies: in the parameter's own precision, and in float64.

A twin of the optimizer, of the same class and with the same options, has that parameter alone, with copies of its
gradient and state. Nothing of the training is touched: a class that torch does not bring along runs under a guard that
ends the replay before an operation reads or writes the training's tensors, or communicates.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import is_shard, local

ENTRY_BY_ENTRY = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD",
     "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"}
)  # fmt: skip
"""Classes of torch.optim that update each entry by itself, so that a shard can be replayed alone."""

_IMPLEMENTATIONS = ("fused", "foreach", "capturable")
"""Options that choose among implementations of one step."""

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

_OF_THE_BASE_CLASS = frozenset(vars(Optimizer([torch.zeros(1)], {}))) | {"step", "grad_scale", "found_inf"}


class NotReplayable(Exception):  # noqa: N818 - it is a statement about the optimizer, not an error of the program
    """The step cannot be replayed; the message says why, as the end of «not judged: …»."""


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """The right weights after a step, float64, and the same step in the parameter's own precision.

    ``traced``: that step with the arithmetic of compiled code, None where nothing is compiled.
    """

    exact: Tensor
    native: Tensor
    traced: Tensor | None = None


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class is one of torch.optim's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose step changes weights: of ZeroRedundancyOptimizer the one inside, with its share."""
    inner = getattr(optimizer, "optim", None)
    is_zero = type(optimizer).__name__ == "ZeroRedundancyOptimizer" and isinstance(inner, Optimizer)
    return inner if is_zero else optimizer  # type: ignore[return-value]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups with which the optimizer that changes weights is going to step.

    A wrapper hands its options, such as the learning rate, to the one inside only within the step.
    """
    inner = stepping(optimizer)
    if inner is optimizer:
        return optimizer.param_groups
    return [
        {**own, **{key: value for key, value in outer.items() if key != "params"}}
        for own, outer in zip(inner.param_groups, optimizer.param_groups, strict=True)
    ]


def require_replayable(optimizer: Optimizer) -> None:
    """Refuse optimizers whose step is not a function of each parameter's own weights, gradient and state.

    Raises:
        NotReplayable: it cannot be replayed parameter by parameter.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotReplayable(f"{name} evaluates the loss several times in a step")
    if not is_of_torch(optimizer):
        for key, value in vars(optimizer).items():
            if key not in _OF_THE_BASE_CLASS and not _is_plain(value):
                raise NotReplayable(f"{name}.{key} cannot be copied for a replay")


def replayed(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, guard: Guard) -> ReplayedStep:
    """Return what the optimizer's next step makes of one parameter, which must have a gradient.

    Raises:
        NotReplayable: the step of a copy fails.
    """
    assert parameter.grad is not None
    name = type(optimizer).__name__
    is_part = local(parameter) is not parameter or is_shard(parameter)
    if is_part and not (is_of_torch(optimizer) and name in ENTRY_BY_ENTRY):
        raise NotReplayable(f"{name} combines all entries of a parameter, but the rank holds only a shard of it")
    try:
        with torch.no_grad(), guard.around(optimizer):
            native = _stepped(optimizer, group, parameter)
            exact = _stepped(optimizer, group, parameter, exact=True)
            compiled = is_of_torch(optimizer) and _is_anything_compiled()
            traced = _stepped(optimizer, group, parameter, traced=True) if compiled else None
    except NotReplayable:
        raise
    except Exception as error:  # what another class does with its copy is not known beforehand
        raise NotReplayable(f"a copy of {name} cannot step ({type(error).__name__}: {error})") from error
    return ReplayedStep(exact, native, traced)


class Guard:
    """Keeps the replay of a class that is not torch's own away from the training's tensors and from other ranks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._protected = {memory(tensor) for tensor in _tensors_of(optimizer)} - {0}

        self._devices = [
            device for device in {tensor.device for tensor in parameters_of(optimizer)} if device.type != "cpu"
        ]

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """Make one replay harmless; random numbers that it draws are drawn again by the training."""
        if is_of_torch(optimizer):
            yield
            return
        kind = self._devices[0].type if self._devices else "cuda"
        with torch.random.fork_rng(self._devices, device_type=kind), _NoTouch(self._protected):
            yield


class _NoTouch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, protected: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._protected = protected

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COMMUNICATION:
            raise NotReplayable("its step communicates with other ranks")
        if func not in _COPIES:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and memory(leaf) in self._protected:
                    raise NotReplayable("its step uses tensors other than its parameter's own")
        return func(*args, **(kwargs or {}))


_COPIES = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.detach.default,
     torch.ops.aten.alias.default}
)  # fmt: skip
"""What the replay itself does with the training's tensors. None of them writes."""


def _is_anything_compiled() -> bool:
    """Return whether torch.compile has seen a frame; whether this step was among them, is not told."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, *, exact: bool = False, traced: bool = False
) -> Tensor:
    """Return the weights after one step of a twin of the optimizer.

    ``exact`` is in float64. ``traced`` is as compiled code computes it: there the number of the step, and what follows
    from it, are tensors in float32, where a plain step has Python's numbers; 1 - β₂ at the first step is off by 3e-5.
    """
    assert parameter.grad is not None
    own = torch.nn.Parameter(_copied(parameter, exact))
    own.grad = _copied(parameter.grad, exact)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({key: copy.copy(value) for key, value in vars(optimizer).items() if key != "step"})
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    options = _options(group, parameter.dtype, exact)
    if traced:
        options |= {key: False for key in _IMPLEMENTATIONS if key in options}
    twin.param_groups = [{**options, "params": [own]}]
    twin.state = defaultdict(dict)
    if parameter in optimizer.state:
        twin.state[own] = {key: _copied(value, exact) for key, value in optimizer.state[parameter].items()}
    if (exact or traced) and not _unscaled(twin, own.grad):
        return own.detach()
    with _as_if_compiled() if traced else nullcontext():
        # Without what torch and others have wrapped around it: hooks would count this as a step of the training.
        inspect.unwrap(type(optimizer).step)(twin)
    return own.detach()


@contextmanager
def _as_if_compiled() -> Iterator[None]:
    """Let optimizers compute as they do where torch.compile traces them, without tracing them."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def _unscaled(twin: Optimizer, gradient: Tensor) -> bool:
    """Divide by the loss scale what a fused optimizer would; return False where it would skip the step.

    GradScaler sets both attributes for the time of a step (``_step_supports_amp_scaling``).
    """
    found, scale = (twin.__dict__.pop(name, None) for name in ("found_inf", "grad_scale"))
    if scale is not None:
        gradient.div_(float(scale))
    return found is None or not float(found)


def _options(group: dict[str, Any], dtype: torch.dtype, exact: bool) -> dict[str, Any]:
    """Return a group's options; in float64 without the implementations that only some dtypes and devices have."""
    if not exact:
        return {key: _copied(value, exact) for key, value in group.items() if key != "params"}
    options = {key: _number(value) for key, value in group.items() if key != "params"}
    for key in (*_IMPLEMENTATIONS, "differentiable"):
        if options.get(key):
            options[key] = False
    epsilon = options.get("eps")
    if isinstance(epsilon, (tuple, list)) and epsilon and epsilon[0] is None:
        # Adafactor takes the rounding unit of the parameter's dtype, which is not that of its copy.
        options["eps"] = (torch.finfo(dtype).eps, *epsilon[1:])
    return options


def _number(value: Any) -> Any:
    """Return an option with numbers in place of tensors of one entry, which would bring their dtype with them."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(_number, value))
    return copy.copy(value)


def _copied(value: Any, exact: bool) -> Any:
    """Return a copy of one value of a state; floating-point tensors in float64 if ``exact``."""
    if isinstance(value, Tensor):
        own = local(value.detach())
        if exact and own.is_floating_point():
            return own.to(torch.float64, copy=True)
        if exact and own.is_complex():
            return own.to(torch.complex128, copy=True)
        return own.clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(one, exact) for one in value)
    if isinstance(value, dict):
        return {key: _copied(one, exact) for key, one in value.items()}
    return copy.copy(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value consists of numbers, words and types alone."""
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in parameters_of(optimizer):
        yield from _tensors((parameter, parameter.grad))
    yield from _tensors(list(optimizer.state.values()))


def _tensors(values: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, 0 where it has none of its own (sparse tensors, wrappers)."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
