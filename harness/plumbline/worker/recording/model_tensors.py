"""The model that is trained, as this rank has it: weights, buffers and received gradients, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from plumbline.core.errors import TraceError
from plumbline.core.mesh import FlatPart
from plumbline.evidence.tensor_store import TensorStore
from plumbline.evidence.trace import Tensors
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of
from plumbline.worker.recording.flat_shards import FlatShard, FlatShards
from plumbline.worker.recording.tensor_copies import copied, is_flattened, is_still, kept


class ModelTensors:
    """Copies what this rank holds of a ``model``; large tensors are written to ``store``.

    ``holds_nothing``: among the names to which it was restricted was none of a parameter.
    """

    def __init__(self, store: TensorStore | None) -> None:
        self.model: nn.Module | None = None
        self.holds_nothing = False
        self._store = store
        self._shapes: dict[str, torch.Size] = {}
        self._names = ParameterNames()
        self._held: frozenset[str] | None = None
        self._flat = FlatShards()

    def watch(self, model: nn.Module) -> None:
        """Take a model in the place of the one that there was, before anything shards it."""
        self.model = model
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    @contextmanager
    def holding(self, names: Collection[str]) -> Iterator[None]:
        """Restrict it to the parameters and buffers ``names``, as if the model had no others."""
        self._held = frozenset(names)
        self.holds_nothing = not self._own_parameters()
        try:
            yield
        finally:
            self._held = None

    def flat_parts(self, parts: Mapping[str, FlatPart], ranks: Collection[int]) -> None:
        self._flat.declare(parts, self._shapes, ranks)

    def weights(self) -> Tensors:
        return {name: kept(parameter, self._store) for name, parameter in self._own_parameters().items()}

    def weights_since(self, last: Tensors | None) -> Tensors:
        """Return the weights as they are now: ``last`` itself where they have not changed since."""
        own = self._own_parameters()
        if last is not None and last.keys() == own.keys() and all(is_still(own[name], last[name]) for name in last):
            return last
        return self.weights()

    def buffers(self, module: nn.Module) -> Tensors:
        """Return copies of the buffers of the model, or of a copy of it."""
        return {name: copied(buffer) for name, buffer in module.named_buffers() if self._holds(name)}

    def received(self, optimizer: Optimizer) -> Tensors:
        """Return the gradients that an optimizer has received, by the names of their parameters."""
        parameters = parameters_of(optimizer)
        scale = scale_left(optimizer)
        received = {
            name: kept(parameter.grad if scale == 1.0 else parameter.grad.detach() / scale, self._store)
            for name, parameter in zip(self._known_names(optimizer), parameters, strict=True)
            if name is not None and parameter.grad is not None
        }
        flat = self._flat.gradients_in(parameters, scale)
        return received | {name: kept(gradient, self._store) for name, gradient in flat}

    def names_of(self, optimizer: Optimizer) -> tuple[str, ...]:
        flat = self._flat.names_in(parameters_of(optimizer))
        return (*filter(None, self._known_names(optimizer)), *flat)

    def learning_rates(self, optimizer: Optimizer) -> tuple[float, ...]:
        # Of flat tensors a trainer steps one after the other, and takes the rest out of their groups meanwhile.
        groups = [group for group in optimizer.param_groups if group["params"] or not self._flat]
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def refuse_flattened(self) -> None:
        """Raise where the model's parameters are pieces of flat vectors, which cannot be put together.

        Raises:
            TraceError: it names the parameter, and what can be recorded.
        """
        for name, parameter in self.model.named_parameters() if self.model is not None else ():
            changed = is_flattened(parameter) or parameter.shape != self._shapes.get(name, parameter.shape)
            if changed and name not in self._flat:
                raise TraceError(
                    f"{name} is flattened, as FullyShardedDataParallel does it: of sharded parameters only DTensors, "
                    "which fully_shard (FSDP2) makes, and what the subject declares by job.flat_parts can be recorded"
                )

    def _own_parameters(self) -> dict[str, nn.Parameter | FlatShard]:
        every = () if self.model is None else self.model.named_parameters()
        return {
            name: self._flat.weight(name) if name in self._flat else parameter
            for name, parameter in every
            if self._holds(name)
        }

    def _holds(self, name: str) -> bool:
        return self._held is None or name in self._held

    def _known_names(self, optimizer: Optimizer) -> list[str | None]:
        """Return the names of an optimizer's parameters, in its own order; None for one that is not the model's."""
        parameters = parameters_of(optimizer)
        if self.model is not None and not all(map(self._names.knows, parameters)):
            # As the model is now: fully_shard has put others in the place of the parameters that there were at first.
            self._names = ParameterNames(self.model)
        return self._names.known(parameters)
