"""Notes digests of weights, gradients and buffers, which show ranks that hold different ones."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.parallelism import ParallelismObserver, active_wrapper, world_size
from plumbline.check.rank.tensor_digest import projection, readable_values, tensor_digest, tensor_digests
from plumbline.recording.module_calls import running_modules
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import attempt, undone_by
from plumbline.recording.pause import is_rehearsal
from plumbline.recording.sharding import is_replicated
from plumbline.replay.collectives import collectives
from plumbline.replay.unwrapping import wrapped_in

MOST_LATER = 16
"""After so many looks at weights after the recorded steps, there are no more."""


class WeightObserver(Observer):
    """Notes weights if there are several ranks. Shards are left out, as each rank has its own.

    The process has ``modules``: each parameter of each outermost module at its first recorded forward. ``constants``
    has the parameters of modules whose outputs have no gradient, such as a teacher, with digests before the first call
    and at the end of the recording. A step has, in the order of the optimizer's parameters, the digests ``before``,
    ``gradients`` and ``after``, and linear projections of the weights, whose relative distance is about the same as
    that of the weights: ``projections`` after the step, and ``projected_before``. ``began`` has the digests before the
    optimizer's very first step, which may not be recorded; None for parameters that the optimizer got later.
    ``unreduced`` says why a wrapper reduces no gradients of its own parameter, and ``replicated`` which parameters are
    DTensors that should be the same on all ranks. ``copied``: the gradient is one that should be the same on all ranks.

    If no wrapper reduces gradients, ranks may make their weights equal only after the recorded steps, as in local SGD.
    ``later`` has digests of one parameter, with the index ``place`` in its optimizer, before the first later steps that
    follow a communication, by their numbers since the recording.
    """

    name = "weights"

    def __init__(self, parallelism: ParallelismObserver) -> None:
        self._parallelism = parallelism
        self._modules: list[nn.Module] = []
        self._initial: list[Facts] = []
        self._noted: Facts = {}
        self._began: dict[int, str | None] = {}
        self._after: dict[int, tuple[str | None, list[float] | None]] = {}
        self._seen: Any = WeakTensorKeyDictionary()  # parameters of modules that were called without gradients
        self._called: list[tuple[weakref.ref[nn.Module], list[str | None]]] = []
        self._constants: list[Facts] = []
        self._alone: Optimizer | None = None
        self._place = 0
        self._later: dict[str, str | None] = {}

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a module's parameters when it is called for the first time: a wrapper has broadcast them by now."""
        if world_size() == 1 or any(known is module for known in self._modules):
            return
        self._modules.append(module)
        wrapper = self._parallelism.wrapper_of(module)
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        inner: nn.Module = getattr(wrapper, "module", module)
        self._initial.append(
            {
                "class": type(module).__name__,
                "wrapped": wrapper is not None,
                "parameters": [
                    {
                        "name": name,
                        "shape": list(parameter.shape),
                        "trained": parameter.requires_grad,
                        "ignored": name in ignored,
                        "digest": tensor_digest(parameter),
                    }
                    for name, parameter in inner.named_parameters()
                ],
            }
        )

    def constant_called(self, module: nn.Module) -> None:
        """Note a module's parameters, unless they are those of modules that were called before."""
        parameters = list(module.parameters()) if world_size() > 1 and self.attends and not is_rehearsal() else []
        if any(one not in self._seen for one in parameters):
            self._seen.update(dict.fromkeys(parameters))
            self._called.append((weakref.ref(module), list(map(tensor_digest, parameters))))

    def first_step(self, optimizer: Optimizer) -> None:
        if world_size() > 1:
            self._began |= {id(p): tensor_digest(p) for p in parameters_of(optimizer)}

    def before_step(self, optimizer: Optimizer) -> None:
        if world_size() > 1:
            parameters = parameters_of(optimizer)
            gradients = [p.grad for p in parameters]
            before = tensor_digests(parameters)
            self._noted = {
                "wrapped": self._wrapped(parameters),
                "unreduced": self._unreduced(parameters),
                "replicated": [is_replicated(p, world_size()) for p in parameters],
                "copied": [g is not None and is_replicated(g, world_size()) for g in gradients],
                "began": [self._began.get(id(p)) for p in parameters],
                "before": before,
                "projected_before": [self._projection(p, digest) for p, digest in zip(parameters, before, strict=True)],
                "gradients": _gradient_digests(gradients),
            }

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        if world_size() == 1:
            return None
        noted, self._noted = self._noted, {}
        parameters = parameters_of(optimizer)
        after, projections = tensor_digests(parameters), [projection(p) for p in parameters]
        self._after |= {id(p): (digest, made) for p, digest, made in zip(parameters, after, projections, strict=True)}
        if parameters and not any(noted.get("wrapped", ())):
            self._alone, self._place = optimizer, min(range(len(parameters)), key=lambda one: parameters[one].numel())
        return {**noted, "after": after, "projections": projections}

    def _projection(self, parameter: Tensor, digest: str | None) -> list[float] | None:
        """Project only weights that have changed since the last step."""
        known = self._after.get(id(parameter))
        return known[1] if known is not None and known[0] == digest else projection(parameter)

    def stop(self) -> None:
        super().stop()
        trained = {*self._began, *self._after, *(id(p) for module in self._modules for p in module.parameters())}
        for called, before in self._called:
            named = [] if (module := called()) is None else list(module.named_parameters())
            if named and len(named) == len(before) and trained.isdisjoint(id(one) for _, one in named):
                self._constants.append(
                    {
                        "class": type(module).__name__,
                        "parameters": [
                            {"name": name, "shape": list(one.shape), "before": digest, "after": tensor_digest(one)}
                            for (name, one), digest in zip(named, before, strict=True)
                        ],
                    }
                )
        self._modules, self._after, self._called = [], {}, []

    def final_facts(self) -> Facts | None:
        later = {"later": self._later, "place": self._place} if self._later else {}
        return {"modules": self._initial, "constants": self._constants, **later} if self._initial else None

    def after_recording(self, write: Callable[[], None]) -> None:
        """Look at one parameter before the next steps that follow a communication."""
        count, steps = sum(collectives().values()), 0

        def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal count, steps
            if optimizer is not self._alone or len(self._later) == MOST_LATER:
                return
            steps += 1
            if count != (now := sum(collectives().values())):
                count = now
                self._later[f"{steps}"] = attempt(tensor_digest, parameters_of(optimizer)[self._place])
                write()

        if self._alone is not None:
            hook: Any = torch._compile._disable_dynamo(look)
            undone_by(register_optimizer_step_pre_hook(hook).remove)

    def _wrapped(self, parameters: list[Tensor]) -> list[bool]:
        """Return for each parameter whether a DistributedDataParallel keeps it the same on all its ranks."""
        kept: set[int] = set()
        for module in self._modules:
            wrapper = self._parallelism.wrapper_of(module)
            ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
            named = wrapper.module.named_parameters() if wrapper is not None else ()
            kept.update(id(p) for name, p in named if name not in ignored and p.requires_grad)
        return [id(parameter) in kept for parameter in parameters]

    def _unreduced(self, parameters: list[Tensor]) -> list[str]:
        why: dict[int, str] = {}
        for module in self._modules:
            why |= self._parallelism.unreduced(module)
        return [why.get(id(parameter), "") for parameter in parameters]


def _gradient_digests(gradients: Sequence[Tensor | None]) -> list[str | None]:
    dense = [one for one in gradients if one is not None and one.layout is not torch.sparse_coo]
    digests = iter(tensor_digests(dense))
    return [
        None if one is None else _sparse_digest(one) if one.layout is torch.sparse_coo else next(digests)
        for one in gradients
    ]


def _sparse_digest(gradient: Tensor) -> str:
    made = gradient.coalesce()
    return f"{tensor_digest(made.indices())} {tensor_digest(made.values())}"


Statistics: Any = (torch.nn.modules.batchnorm._NormBase,)
"""Layers whose floating-point buffers are running statistics: a NaN in them never goes away."""


class BufferObserver(Observer):
    """Notes, for each backward pass, the buffers at each training forward before it: ``{"forwards": [...]}``.

    A forward has the digest and the norm of each buffer, and ``broadcast``: whether the DistributedDataParallel through
    which the module is called should have broadcast the buffers just before. A step has the running statistics that
    contain NaN.
    """

    name = "buffers"

    def __init__(self, parallelism: ParallelismObserver) -> None:
        self._parallelism = parallelism
        self._modules: list[nn.Module] = []
        self._forwards: list[Facts] = []

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(known is module for known in self._modules):
            self._modules.append(module)
        if not module.training or world_size() == 1 or running_modules():
            return  # a module that contains this one was noted, and may have changed the buffers since
        if not isinstance(module, DistributedDataParallel) and wrapped_in(module):
            return  # the wrappers inside of it broadcast their buffers later
        wrapper = self._parallelism.wrapper_of(module)
        inner = getattr(wrapper, "module", module)
        broadcast = _broadcast(wrapper, module)
        buffers = dict(inner.named_buffers())
        if broadcast:  # only those that it knows: others may be left out on purpose, or be added later
            known = {id(buffer) for buffer in getattr(wrapper, "modules_buffers", ())}
            buffers = {name: value for name, value in buffers.items() if id(value) in known}
        if buffers:
            self._forwards.append(
                {
                    "module": next(i for i, known in enumerate(self._modules) if known is module),
                    "wrapped": wrapper is not None,
                    "broadcast": broadcast,
                    "buffers": {name: _noted(value) for name, value in buffers.items()},
                }
            )

    def backward_ends(self, number: int) -> Facts | None:
        forwards, self._forwards = self._forwards, []
        return {"forwards": forwards} if forwards else None

    def after_step(self, optimizer: Optimizer, *, skipped: bool) -> Facts | None:
        """Return which running statistics of the called modules hold NaN."""
        names = [name for module in self._modules for name in _not_a_number(module)]
        return {"nan": names} if self._modules else None

    def stop(self) -> None:
        self._modules, self._forwards = [], []


def _broadcast(wrapper: Any, module: nn.Module) -> bool:
    """Return whether the wrapper broadcast buffers before it called the module.

    It does so before the first forward, and before each forward after one whose gradients are reduced. What a hook of
    the script does instead is not known.
    """
    if wrapper is None or wrapper is module or hasattr(wrapper, "buffer_hook"):
        return False
    # A private name: if a version of torch lacks it, no broadcast is expected.
    synchronises = bool(getattr(wrapper, "require_forward_param_sync", False))
    return active_wrapper() is wrapper and bool(wrapper.broadcast_buffers) and synchronises


def _noted(buffer: Tensor) -> list[Any]:
    """Return a buffer's digest and its norm, None where it has no finite one."""
    values = readable_values(buffer)
    if values is None or not values.is_floating_point():
        return [tensor_digest(buffer), None]
    norm = float(torch.linalg.vector_norm(values.float()))
    return [tensor_digest(buffer), norm if math.isfinite(norm) else None]


def _not_a_number(module: nn.Module) -> list[str]:
    return [
        f"{name}.{own}" if name else own
        for name, part in module.named_modules()
        if isinstance(part, Statistics)
        for own, buffer in part.named_buffers(recurse=False)
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any())
    ]
