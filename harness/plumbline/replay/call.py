"""What is recorded of one call of a module, so that it can be run again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.recording.flat_sharding import part_of
from plumbline.recording.sharding import local
from plumbline.recording.zero3 import held
from plumbline.replay.autocast_state import AutocastState
from plumbline.replay.random_state import RandomState

SAMPLE = 1024
"""Entries of an output that are kept at most, to compare a replay with."""


@dataclass(frozen=True)
class UsedParameter:
    """A parameter as it was when a module was called; ``dtype`` is that in which a flat one is computed with."""

    parameter: nn.Parameter
    state: tuple[int, int]
    requires_grad: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, parameter: nn.Parameter) -> UsedParameter:
        """Return how ``parameter`` is now."""
        part = part_of(parameter)
        dtype = parameter.dtype if part is None else part.unit.dtype
        return cls(parameter, _state(parameter), parameter.requires_grad, dtype)

    @property
    def changed(self) -> bool:
        """Whether its values were replaced or written to since."""
        return _state(self.parameter) != self.state


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the version and the address of a parameter's values."""
    if (part := part_of(parameter)) is None:
        own = held(parameter)
        return own._version, own.data_ptr()
    version, address = part.unit.state
    return parameter._version + version, address


@dataclass(eq=False)
class Activation:
    """An argument with a gradient of its own, as a stage of a pipeline receives it, and what arrived at it, by pass."""

    sample: Tensor
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class TrackedCall:
    """One call of a module with gradients enabled.

    ``args`` and ``kwargs`` hold copies of the tensors that the module was given, except of parameters. ``buffers`` are
    the module's buffers before the call, by their identity then. ``outputs`` has a sample of each tensor of the output
    that requires a gradient. ``cotangents`` has, for each backward pass, the gradient that arrived at each output from
    outside of the call, None where there was none. ``obstacle`` says why the call cannot be run again, "" if it can.
    ``scalars`` are the places in ``outputs`` of single numbers in the output, each with its key, field or place there.
    ``compiled`` says whether the module or a part of it ran as compiled code. ``collectives`` counts, by the names of
    process groups, how often it communicated. ``is_distributed``: parameters are DTensors that no replay gathers.
    ``activations`` are arguments that are leaves with a gradient, as a stage of a pipeline is given them.
    ``set_inputs`` are those that the script set as attributes of modules before the call: where each was, and a copy.
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
    compiled: bool = False
    parameters: tuple[UsedParameter, ...] = ()
    foreign: tuple[nn.Parameter, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    scalars: dict[int, str | int] = field(default_factory=dict)
    cotangents: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    obstacle: str = ""
    collectives: dict[str, int] = field(default_factory=dict)
    is_distributed: bool = False
    activations: tuple[Activation, ...] = ()
    set_inputs: tuple[tuple[dict[str, Any], str, Tensor], ...] = ()
    discarded: bool = False
    graph: weakref.ref[Any] | None = None

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that required a gradient."""
        return [one.parameter for one in self.parameters if one.requires_grad]

    @property
    def receives_activations(self) -> bool:
        """Whether it was given a leaf with a gradient, or a copy of one, as a stage of a pipeline is."""
        return bool(self.activations)

    @property
    def eps(self) -> float:
        """The relative spacing of numbers in the coarsest precision that it may compute in."""
        dtypes = {one.dtype for one in self.parameters} | {one.dtype for one in self.outputs}
        dtypes |= {one.dtype for one in self.autocast if one.enabled}
        return max(torch.finfo(one).eps for one in dtypes if one.is_floating_point or one.is_complex)

    @property
    def is_over(self) -> bool:
        """Whether no backward pass can reach the call any more."""
        return self.graph is not None and self.graph() is None

    @property
    def name(self) -> str:
        """The class of its module."""
        return type(self.module).__name__


def sample(tensor: Tensor) -> Tensor:
    """Return at most ``SAMPLE`` entries of what this rank holds of a tensor, evenly spread over it, as a copy."""
    flat = local(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // SAMPLE))
    return flat[::stride].clone()
