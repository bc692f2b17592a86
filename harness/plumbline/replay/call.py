"""The record of one module call, from which the call can be run again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.recording.flat_sharding import part_of
from plumbline.recording.sharding import held, local
from plumbline.replay.random_state import AutocastState, RandomState

SAMPLE = 1024
"""The largest number of entries that are kept of an output, for the comparison with a replay."""


@dataclass(frozen=True)
class UsedParameter:
    """A parameter at the time of a call; ``dtype`` is the one in which the module computes with it."""

    parameter: nn.Parameter
    state: tuple[int, int]
    requires_grad: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: nn.Parameter) -> UsedParameter:
        part = part_of(parameter)
        dtype = parameter.dtype if part is None else part.unit.dtype
        return cls(parameter, state_of(parameter), parameter.requires_grad, dtype)

    @property
    def changed(self) -> bool:
        """Whether the values have been replaced or written to since."""
        return state_of(self.parameter) != self.state


def state_of(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the version and the address of a parameter's values."""
    if (part := part_of(parameter)) is None:
        own = held(parameter)
        return own._version, own.data_ptr()
    version, address = part.unit.state
    return parameter._version + version, address


@dataclass(eq=False)
class Activation:
    """A leaf argument that requires a gradient, as a pipeline stage receives it, and its gradients by backward pass."""

    sample: Tensor
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class TrackedCall:
    """One call of a module with gradients enabled.

    ``args`` and ``kwargs`` are the arguments of the module, with copies of all tensors except parameters. ``buffers``
    has the module's buffers and their copies from before the call, by identity. It also has frozen parameters that the
    module changes in its forward, as a momentum encoder is changed. ``outputs`` has a sample of each output
    tensor that requires a gradient. ``cotangents`` has, by backward pass, the gradient that arrived at each output from
    outside of the call, or None. ``obstacle`` says why the call cannot be run again; it is empty if it can. ``scalars``
    maps the index in ``outputs`` of each single-number tensor to its key, field or index in the output. ``compiled``:
    the module or a part of it ran as compiled code. ``collectives`` counts how often the call communicated, by the
    names in ``collectives()``. ``is_distributed``: some parameters are DTensors that no replay gathers. ``activations``
    are the arguments that are leaves and require a gradient, as in a pipeline stage. ``runs_code``: a backward pass
    runs custom functions in Python, which may do something else each time. ``set_inputs`` has the activations that the
    script set as attributes of modules before the call: the attributes, the name, and a copy. ``frozen`` has
    entries of frozen parameters, and ``nodes`` the nodes that computed the arguments, while the call runs. A module may
    write its outputs into a dict that it is given, so the arguments are different afterwards.
    """

    number: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    autocast: tuple[AutocastState, ...]
    default_dtype: torch.dtype
    training: tuple[tuple[nn.Module, bool], ...]
    buffers: dict[int, tuple[Tensor, Tensor]]
    frozen: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    nodes: tuple[Any, ...] = ()
    compiled: bool = False
    parameters: tuple[UsedParameter, ...] = ()
    foreign: tuple[nn.Parameter, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    scalars: dict[int, str | int] = field(default_factory=dict)
    cotangents: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    obstacle: str = ""
    collectives: dict[str, int] = field(default_factory=dict)
    is_distributed: bool = False
    runs_code: bool = False
    activations: tuple[Activation, ...] = ()
    set_inputs: tuple[tuple[dict[str, Any], str, Tensor], ...] = ()
    discarded: bool = False
    graph: weakref.ref[Any] | None = None

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [one.parameter for one in self.parameters if one.requires_grad]

    @property
    def is_changed(self) -> bool:
        """Whether a parameter that was not copied has been replaced or written to since the forward."""
        return any(one.changed for one in self.parameters if id(one.parameter) not in self.buffers)

    @property
    def receives_activations(self) -> bool:
        """Whether an argument is a leaf that requires a gradient, or a copy of one, as for a pipeline stage."""
        return bool(self.activations)

    @property
    def eps(self) -> float:
        """The relative spacing of numbers in the coarsest precision that the call may compute in."""
        dtypes = {one.dtype for one in self.parameters} | {one.dtype for one in self.outputs}
        dtypes |= {one.dtype for one in self.autocast if one.enabled}
        return max(torch.finfo(one).eps for one in dtypes if one.is_floating_point or one.is_complex)

    @property
    def is_over(self) -> bool:
        """Whether no backward pass can reach the call any more."""
        return self.graph is not None and self.graph() is None

    @property
    def name(self) -> str:
        return type(self.module).__name__


def sample(tensor: Tensor) -> Tensor:
    """Return a copy of at most ``SAMPLE`` evenly spread entries of this rank's part of a tensor."""
    flat = local(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // SAMPLE))
    return flat[::stride].clone()
