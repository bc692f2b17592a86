"""The model that is trained, as this rank has it: weights, buffers and received gradients, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from plumbline.core.errors import TraceError
from plumbline.core.mesh import FlatPart, Part
from plumbline.evidence.tensor_store import TensorStore
from plumbline.evidence.trace import Shard, Tensors
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of
from plumbline.worker.recording.declared_parts import DeclaredParts
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
        self._parts = DeclaredParts()

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

    def parts(self, parts: Mapping[str, FlatPart | Part], ranks: Collection[int]) -> None:
        self._parts.declare(parts, self._shapes, ranks)

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
        declared = self._parts.gradients_in(parameters, scale)
        return received | {name: kept(gradient, self._store) for name, gradient in declared}

    def names_of(self, optimizer: Optimizer) -> tuple[str, ...]:
        declared = self._parts.names_in(parameters_of(optimizer))
        return (*filter(None, self._known_names(optimizer)), *declared)

    def learning_rates(self, optimizer: Optimizer) -> tuple[float, ...]:
        # Of flat tensors a trainer steps one after the other, and takes the rest out of their groups meanwhile.
        groups = [group for group in optimizer.param_groups if group["params"] or not self._parts.are_flat]
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def refuse_undeclared_parts(self) -> None:
        """Raise where a plain parameter is a part of the model's, and the subject did not say which.

        Raises:
            TraceError: it names the parameter, and what to declare.
        """
        for name, parameter in self.model.named_parameters() if self.model is not None else ():
            whole = self._shapes.get(name, parameter.shape)
            if self._parts.hold(parameter) or name in self._parts:
                continue
            # With use_orig_params=True, FullyShardedDataParallel shows runs of its flat parameter as plain parameters.
            if is_flattened(parameter) or (parameter.dim() == 1 and len(whole) != 1):
                raise TraceError(
                    f"{name} is in a flat parameter of FullyShardedDataParallel: shard with fully_shard (FSDP2), or "
                    "declare where this rank has its part of each parameter with job.parts"
                )
            if parameter.shape != whole:
                raise TraceError(
                    f"{name} is {list(parameter.shape)} on this rank and {list(whole)} in job.model(): declare this "
                    "rank's part of it with job.parts, or make it a DTensor"
                )

    def _own_parameters(self) -> dict[str, nn.Parameter | Shard]:
        every = () if self.model is None else self.model.named_parameters()
        plain = {name: parameter for name, parameter in every if not self._parts.hold(parameter)}
        declared = {name: self._parts.weight(name) for name in self._parts}
        return {name: held for name, held in (plain | declared).items() if self._holds(name)}

    def _holds(self, name: str) -> bool:
        return self._held is None or name in self._held

    def _known_names(self, optimizer: Optimizer) -> list[str | None]:
        """Return the names of an optimizer's parameters, in its own order; None for those of which parts are declared.

        None, too, for one that is not the model's.
        """
        parameters = parameters_of(optimizer)
        if self.model is not None and not all(map(self._names.knows, parameters)):
            # As the model is now: fully_shard has put others in the place of the parameters that there were at first.
            self._names = ParameterNames(self.model)
        known = zip(self._names.known(parameters), parameters, strict=True)
        return [None if self._parts.hold(parameter) else name for name, parameter in known]
