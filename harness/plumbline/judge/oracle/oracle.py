"""The oracle: a plain single-process implementation of a workload's training.

In float64 it gives the correct values. In the cell's precision, on one device and in other orders of summation, it
measures the error that rounding alone explains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from plumbline.core.precision import Precision
from plumbline.evidence.trace import Step, Tensors
from plumbline.judge.oracle.layout import Group, Layout, Share, sample_of
from plumbline.judge.oracle.noise import is_finite
from plumbline.workloads import Batch, Columns, Workload


class Optimizers:
    """Optimizers that step together, each over its own part of the parameters; usually there is one.

    ``every`` is in the order of the model, like the recorded learning rates. ``after_step`` is called after each step.
    """

    def __init__(self, every: Sequence[torch.optim.Optimizer], after_step: Callable[[], None]) -> None:
        self.every = every
        self._after_step = after_step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, in order."""
        return [group for optimizer in self.every for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.every:
            optimizer.step()
        self._after_step()


def in_order_of(
    parameters: Iterable[nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Return optimizers in the order of their first parameters.

    A workload can return them in another order: Muon for matrices comes before AdamW for a convolution.
    """
    place = {id(parameter): number for number, parameter in enumerate(parameters)}
    return sorted(
        optimizers, key=lambda one: min(place[id(own)] for group in one.param_groups for own in group["params"])
    )


class Oracle:
    """Computes a workload's gradient for a layout, in one precision.

    ``devices`` is the cell's number of devices, which determines the data. Without ``precision``, everything is
    float64. With ``loss_dtype``, the model's floating-point outputs are cast to it before the loss is computed.

    If a precision has master weights, ``stepped`` has these, and the model computes with rounded master weights and
    rounded data; ``rounded_to`` gives their dtype if everything else is float64. Otherwise ``stepped`` has the model's
    parameters.
    """

    def __init__(
        self,
        workload: Workload,
        devices: int,
        precision: Precision | None = None,
        loss_dtype: torch.dtype | None = None,
        rounded_to: torch.dtype | None = None,
    ) -> None:
        self.loss_dtype = loss_dtype
        self.dtype: torch.dtype = getattr(torch, precision.storage) if precision else torch.float64
        self.autocast: torch.dtype | None = (
            getattr(torch, precision.autocast) if precision and precision.autocast else None
        )
        self.workload = workload
        self._devices = devices
        self.model: nn.Module = workload.model(self.dtype).train()
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.trained: dict[str, nn.Parameter] = {k: p for k, p in self.parameters.items() if p.requires_grad}
        self._rounded_to = self.dtype if precision and precision.masters else rounded_to
        self.data: Columns = workload.dataset(devices, self._rounded_to or self.dtype).to(self.dtype)
        self.stepped = self.parameters
        if self._rounded_to is not None:
            stepped: torch.dtype = getattr(torch, precision.stepped) if precision else torch.float64
            self.stepped = {
                k: nn.Parameter(p.detach().to(stepped), p.requires_grad) for k, p in self.parameters.items()
            }
        self._buffer_owners = {
            name: (self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], buffer.dtype)
            for name, buffer in self.buffers.items()
        }
        self._buffers: Tensors = {}
        self._buffers_by_sample: dict[int, Tensors] = {}
        self._row_of: dict[int, int] = {}
        self._drawn: Tensors = {}
        self._turns: list[tuple[tuple[str, ...], Tensors]] = []
        self._batches_between = 0

    @property
    def held_out(self) -> Columns:
        """The data that evaluations use."""
        return self.workload.val_dataset(self._devices, self._rounded_to or self.dtype).to(self.dtype)

    def load(self, weights: Tensors) -> None:
        """Set the weights, a value for every parameter, cast to this precision."""
        with torch.no_grad():
            for name, parameter in self.stepped.items():
                parameter.copy_(weights[name])
        self._round_masters()

    def compute_at(self, weights: Tensors) -> None:
        """Set the weights with which the model computes, rounded only to the model's dtype."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def model_weights(self) -> Tensors:
        """Return the weights with which the model computes."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def _round_masters(self) -> None:
        if self._rounded_to is not None:
            self.compute_at({name: master.detach().to(self._rounded_to) for name, master in self.stepped.items()})

    def set_forward_state(self, steps: Sequence[Step], *, own_buffers: bool = False) -> None:
        """Set a forward's inputs other than the weights: the step's initial buffers, and the masks that layers drew.

        All samples get the first rank's buffers; with ``own_buffers``, a rank's samples get that rank's. Masks are
        found by sample id, so no two draws of a step may have the same id (``with_unique_draws``).
        """
        self._buffers = steps[0].buffers
        self._buffers_by_sample = {
            sample: step.buffers
            for step in (steps[1:] if own_buffers else ())
            for micro in step.micro_batches
            for sample in micro.samples
        }
        self._turns = []
        self._drawn = {}
        micros = [micro for step in steps for micro in step.micro_batches]
        # The first row is for samples without a record.
        self._row_of = {sample: row for row, sample in enumerate({i: None for m in micros for i in m.samples}, start=1)}
        for name in {name for micro in micros for name in micro.drawn}:
            shape = next(micro.drawn[name] for micro in micros if name in micro.drawn).shape[1:]
            table = torch.zeros(len(self._row_of) + 1, *shape)
            for micro in micros:
                if name in micro.drawn and len(micro.drawn[name]) == len(micro.samples):
                    table[[self._row_of[sample] for sample in micro.samples]] = micro.drawn[name].to(table.dtype)
            self._drawn[name] = table.to(self.dtype)

    def set_turns(self, step: Step, batches_between: int) -> None:
        """Compute each optimizer's part of the gradient at the weights that the earlier optimizers left.

        If the optimizers alternate between the ``batches_between`` batches of a step, this applies only to the gradient
        of the last batch; 0 means that they do not alternate.
        """
        self._batches_between, self._turns = batches_between, turns_of(step)

    def set_turn(self, names: tuple[str, ...], weights: Tensors, *, batches_between: int) -> None:
        """Compute the gradient of these parameters at ``weights``; if turns alternate, only that of the last batch."""
        self._batches_between, self._turns = batches_between, [(names, weights)]

    def forward(self, share: Share) -> Any:
        """Return the model's outputs for samples, as a device computes them at the start of the step."""
        self._set_buffers(self._buffers_by_sample.get(share[0], self._buffers) if share else self._buffers)
        batch = self._batch(share)
        for name, table in self._drawn.items():
            batch[name] = table[[self._row_of.get(sample, 0) for sample in share]]
        return self.model(batch)

    def group_gradients(self, layout: Layout, scale: float = 1.0) -> list[list[Tensors]]:
        """Return ∂ℓ/∂w at the loaded weights for every group alone, by micro-batch, in this precision.

        ``scale`` multiplies the loss before backward and divides the gradient after it, as a GradScaler does.
        A parameter that the loss does not depend on is absent.
        """
        parts, *later = self.passes(layout, scale)
        for (names, _), made in zip(self._turns, later, strict=True):
            for groups, others in zip(parts, made, strict=True):
                for part, own in zip(groups, others, strict=True):
                    part.update({name: own[name] for name in names if name in own})
        return parts

    def passes(self, layout: Layout, scale: float = 1.0) -> list[list[list[Tensors]]]:
        """Return the group gradients of every turn's pass, with the gradients of all parameters in each."""
        made = [self._one_pass(layout, scale)]
        begun = self._copies() if self._turns else {}
        for _, weights in self._turns:
            self.load(weights)
            # One device takes each batch at once, and a pipeline in parts.
            parts = max(1, len(layout) // self._batches_between) if self._batches_between else len(layout)
            earlier = made[0][: len(layout) - parts]
            made.append([*earlier, *self._one_pass(layout[len(earlier) :], scale)])
        if begun:
            self.load(begun)
        return made

    def _one_pass(self, layout: Layout, scale: float) -> list[list[Tensors]]:
        return [[self._group_gradient(group, scale) for group in groups] for groups in layout]

    def gradient(self, layout: Layout, scale: float = 1.0) -> Tensors:
        """Return the gradient that the optimizer gets: the mean over groups and micro-batches, clipped if required.

        It is summed in this precision and returned as float64. As in a trainer, the loss of a micro-batch is divided
        before it is scaled. If float16 still overflows, because the trainer sums in another order, a lower scale is
        used: only the rounding matters here.
        """
        scale /= len(layout) if scale > 1 else 1
        gradient = mean_gradient(self.group_gradients(layout, scale))
        while scale > 1 and not is_finite(gradient):
            scale /= 2
            gradient = mean_gradient(self.group_gradients(layout, scale))
        return {k: v.double() for k, v in self.clipped(gradient).items()}

    def clipped(self, gradient: Tensors) -> Tensors:
        """Return the gradient, clipped if required: each turn's optimizer clips by the norm of its own part."""
        parts = [{name: gradient[name] for name in names if name in gradient} for names, _ in self._turns]
        rest = {name: value for name, value in gradient.items() if not any(name in part for part in parts)}
        norm = self.workload.clip_norm
        shortened = {name: value for part in (rest, *parts) for name, value in clipped(part, norm).items()}
        return {name: shortened[name] for name in gradient}

    def _group_gradient(self, group: Group, scale: float) -> Tensors:
        gradients = torch.autograd.grad(self._loss(group) * scale, tuple(self.trained.values()), allow_unused=True)
        return {
            name: gradient.to_dense() / scale if scale != 1 else gradient.to_dense()
            for name, gradient in zip(self.trained, gradients, strict=True)
            if gradient is not None
        }

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    def _loss(self, group: Group) -> Tensor:
        with self._autocast():
            outputs = [self.forward(share) for share in group]
            batch = self._batch([i for share in group for i in share])
            return self.workload.loss(_cast(gather(outputs), self.loss_dtype), batch)

    def loss_of(self, share: Share, targets: Share | None = None) -> Tensor:
        """Return ℓ of samples alone on one device; ``targets`` gives the samples whose targets are used."""
        with self._autocast():
            outputs = _cast(self.forward(share), self.loss_dtype)
            return self.workload.loss(outputs, self._batch(share if targets is None else targets))

    def gradient_with_targets(self, share: Share, targets: Share) -> Tensors:
        """Return ∂ℓ/∂w for the outputs of some samples with the targets of others."""
        made = torch.autograd.grad(self.loss_of(share, targets), tuple(self.trained.values()), allow_unused=True)
        return {name: value.to_dense() for name, value in zip(self.trained, made, strict=True) if value is not None}

    def used_by_one_layer(self, name: str) -> Iterator[nn.Module]:
        """Yield each layer that uses a parameter; meanwhile the other layers' uses of it give no gradient."""
        tied = self.parameters[name]
        uses = [(layer, key) for layer in self.model.modules() for key, one in layer._parameters.items() if one is tied]
        for layer, _ in uses:
            for other, key in uses:
                other._parameters[key] = tied if other is layer else nn.Parameter(tied.detach(), requires_grad=False)
            try:
                yield layer
            finally:
                for other, key in uses:
                    other._parameters[key] = tied

    def _batch(self, drawn: Sequence[int]) -> Batch:
        return self.data.batch(list(map(sample_of, drawn)))

    def losses(self, layout: Layout) -> list[list[Tensor]]:
        """Return ℓ of every group alone at the loaded weights, by micro-batch, in this precision."""
        with torch.no_grad():
            return [[self._loss(group) for group in groups] for groups in layout]

    def evaluation_loss(self, data: Columns, samples: Sequence[int], buffers: Tensors, *, training: bool) -> Tensor:
        """Return ℓ of samples of ``data`` in one batch, in evaluation mode unless ``training``."""
        self.model.train(training)
        try:
            with torch.no_grad(), self._autocast():
                self._set_buffers(buffers)
                batch = data.batch(samples)
                return self.workload.loss(self.model(batch), batch)
        finally:
            self.model.train()

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def buffers_after(self, start: Tensors, shares: Sequence[Share]) -> Tensors:
        """Return the buffers after one device's forwards over ``shares``, starting from ``start``."""
        self._set_buffers(start)
        with torch.no_grad(), self._autocast():
            for share in shares:
                self.model(self._batch(share))
        return {name: buffer.clone() for name, buffer in self.buffers.items()}

    def _set_buffers(self, values: Tensors) -> None:
        for name, value in values.items():
            layer, attribute, dtype = self._buffer_owners[name]
            # A copy: a forward's change to it is discarded, and a backward that saved it may still follow.
            setattr(layer, attribute, value.to(dtype, copy=True))

    def optimizer(self) -> Optimizers:
        stepped = list(self.stepped.values())
        return Optimizers(in_order_of(stepped, self.workload.optimizers(stepped)), self._round_masters)

    def schedule(self, optimizers: Optimizers) -> Callable[..., None]:
        """Return the step function of the workload's schedules, which does nothing if there are none.

        It takes the numbers of the optimizers whose schedules do not advance.
        """
        schedulers = [self.workload.scheduler(optimizer) for optimizer in optimizers.every]

        def step(standing: Collection[int] = ()) -> None:
            for number, scheduler in enumerate(schedulers):
                if scheduler is not None and number not in standing:
                    scheduler.step()

        return step

    def set_gradients(self, gradients: Tensors) -> None:
        """Set ``.grad`` of the trained parameters; None for an absent gradient. Frozen parameters keep theirs."""
        for name in self.trained:
            given, parameter = gradients.get(name), self.stepped[name]
            parameter.grad = None if given is None else given.to(parameter.dtype)

    def weights(self) -> Tensors:
        return {name: parameter.double() for name, parameter in self._copies().items()}

    def _copies(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self.stepped.items()}


def without_held_back(gradient: Tensors, held_back: Collection[str], clip_norm: float | None) -> Tensors:
    """Return the gradient that is left if a loss scaler holds back some optimizers, whose gradients overflowed.

    The ``held_back`` parameters have no gradient. If all parameters are clipped together, the norm is infinite, so the
    others get zeros.
    """
    if not held_back:
        return gradient
    left = 1.0 if clip_norm is None else 0.0
    return {name: value * left for name, value in gradient.items() if name not in held_back}


def turns_of(step: Step) -> list[tuple[tuple[str, ...], Tensors]]:
    """Return the parameters of each turn except the first, and the weights that its pass uses."""
    left, later = step.before, []
    for earlier, names in pairwise(step.turns):
        left = {**left, **{name: step.after[name] for name in earlier if name in step.after}}
        later.append((names, left))
    return later


def mean_gradient(parts: Sequence[Sequence[Tensors]]) -> Tensors:
    """Return the mean over micro-batches of the mean over groups; what is absent in a group counts as zero."""
    total: Tensors = {}
    for groups in parts:
        for part in groups:
            for name, value in part.items():
                share = value / (len(groups) * len(parts))
                total[name] = total[name] + share if name in total else share
    return total


def clipped(gradient: Tensors, norm: float | None) -> Tensors:
    """Return the gradient scaled down so that the 2-norm of all tensors together is at most ``norm``, if given.

    Like ``torch.nn.utils.clip_grad_norm_``, the factor is norm / (length + 1e-6), and at most 1.
    """
    if norm is None or not gradient:
        return gradient
    length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in gradient.values()]))
    factor = min(1.0, norm / (float(length) + 1e-6))
    return {name: value * factor for name, value in gradient.items()}


def _cast(outputs: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return outputs
    return tree_map(lambda o: o.to(dtype) if isinstance(o, Tensor) and o.is_floating_point() else o, outputs)


def gather(outputs: Sequence[Any]) -> Any:
    """Join the outputs of several devices along dim 0; a single one is returned unchanged.

    It raises ``TypeError`` if outputs hold something other than tensors in dicts, lists or tuples.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([o[None] if o.dim() == 0 else o for o in outputs])
    if isinstance(first, dict):
        return {key: gather([o[key] for o in outputs]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(gather(column) for column in zip(*outputs, strict=True))
    raise TypeError(f"outputs of type {type(first).__name__} cannot be gathered along dim 0")
