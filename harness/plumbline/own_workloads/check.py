"""Checks that trainers can be judged on a workload, before anything is trained.

Weights, data, outputs and loss must be the same functions in every process. Otherwise the differences would look like
the trainer's mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plumbline.core.errors import WorkloadError
from plumbline.core.precision import PRECISIONS
from plumbline.own_workloads.load import calling, check_data, check_model
from plumbline.subjects.declare import CAPABILITIES
from plumbline.workloads import Batch, Columns, Workload


def forward_of(model: nn.Module, batch: Batch) -> Any:
    with calling("forward(batch)"):
        return model(batch)


def loss_of(workload: Workload, outputs: Any, batch: Batch) -> Tensor:
    with calling("loss(outputs, batch)"):
        loss: Any = workload.loss(outputs, batch)
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise WorkloadError(f"loss(outputs, batch) returned {what}: return a scalar tensor, for example with .mean()")
    if not bool(loss.isfinite()):
        raise WorkloadError(
            f"loss(outputs, batch) is {float(loss.detach())} at the initial weights: return a finite loss"
        )
    return loss


def pass_of(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(workload, forward_of(model, batch), batch)


class TrainingPass:
    """A model of ``workload`` in training mode, at its initial weights."""

    def __init__(self, workload: Workload, dtype: torch.dtype) -> None:
        self._workload = workload
        self.model = workload.model(dtype).train()

    def gradient(self, batch: Batch) -> dict[str, Tensor]:
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        loss = pass_of(self._workload, self.model, batch)
        with calling("backward"):
            gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return {name: value for name, value in zip(trained, gradients, strict=True) if value is not None}


class NoNarrowing(TorchFunctionMode):
    """Refuses operations that convert a float64 tensor that requires a gradient to a narrower type.

    Its gradient would be rounded as in float32, and the oracle would be no more accurate than the trainer.
    """

    def __torch_function__(
        self, operation: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and result.dtype is not torch.float64
            and any(
                isinstance(given, Tensor) and given.dtype is torch.float64 and given.requires_grad
                for given in tree_leaves((args, kwargs))
            )
        ):
            name = getattr(operation, "__name__", str(operation))
            raise WorkloadError(
                f"{name}() converts float64 to {str(result.dtype).removeprefix('torch.')}: to avoid computing in 16 "
                "bits, cast with x.to(torch.promote_types(x.dtype, torch.float32))"
            )
        return result


_ACCURACY = (torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps) ** 0.5
"""Maximum ratio of the oracle's error to the error of float32. A larger one shows that the oracle is not float64."""


def refuse_unfit(workload: Workload, devices: Sequence[int]) -> None:
    """Check that trainers can be judged on one of the user's own workloads, with these numbers of ``devices``."""
    check_numbers(workload)
    model = check_model(workload)
    every = [check_data(workload, count) for count in devices]
    batches = [*_batches(every[0], workload.global_batch_size(devices[0]))]
    _check_forward(workload, batches[0])
    for data, count in zip(every[1:], devices[1:], strict=True):
        size = workload.global_batch_size(count) // count
        try:
            pass_of(workload, workload.model().train(), data.batch(range(size)))
        except WorkloadError as error:
            raise WorkloadError(
                f"with {count} devices, each gets {size} of the samples of a batch, and then {error}"
            ) from error
    first = TrainingPass(workload, torch.float32)
    gradients = [first.gradient(batch) for batch in batches]
    if not workload.unused_parameters:
        _check_every_parameter(first.model, gradients)
    _check_optimizers(workload, model)
    outputs = forward_of(first.model, batches[0])
    for capability, why in _needed(workload, first.model, outputs, gradients):
        if capability not in workload.needs:
            raise WorkloadError(
                f'{why}: add "{capability}" to needs, as in needs = frozenset({{"{capability}", …}}). Otherwise '
                "trainers that do not support it would fail"
            )
    _check_oracle(workload, devices[0])
    if workload.exact:
        _check_exact(workload, devices[0])


def check_numbers(workload: Workload) -> None:
    for name in ("batch_size", "steps_per_epoch", "epochs", "accumulate"):
        value = getattr(workload, name)
        if not isinstance(value, int) or value < 1:
            raise WorkloadError(f"{name} must be an integer of 1 or more, not {value!r}")
    for what, given, known in (
        ("capability", workload.needs, CAPABILITIES),
        ("precision", workload.precisions, PRECISIONS),
    ):
        for name in given:
            if name not in known:
                raise WorkloadError(f"unknown {what} {name!r}: choose from {', '.join(sorted(known))}")
    if workload.clip_norm is not None and not workload.clip_norm > 0:
        raise WorkloadError(f"clip_norm must be larger than 0, or None, not {workload.clip_norm!r}")


def _batches(data: Columns, size: int) -> Iterator[Batch]:
    for first in range(0, len(data), size):
        yield data.batch(range(first, min(first + size, len(data))))


def _check_forward(workload: Workload, batch: Batch) -> None:
    count = len(batch["index"])
    model = workload.model().train()
    outputs = forward_of(model, batch)
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if not tensors or len(tensors) < len(tree_leaves(outputs)):
        raise WorkloadError(
            f"forward(batch) returned {type(outputs).__name__}: return a tensor with the batch in dim 0, or a dict, "
            "list or tuple of such tensors"
        )
    for tensor in tensors:
        if tensor.dim() and len(tensor) != count:
            raise WorkloadError(
                f"forward(batch) returned a tensor of shape {list(tensor.shape)} for {count} samples: dim 0 must be "
                "the batch, because dp concatenates the devices' outputs along it"
            )
    _check_loss(workload, outputs, batch)
    if not _draws(model):
        _refuse_other_outputs(outputs, forward_of(model, batch))


def _draws(model: nn.Module) -> bool:
    # Random numbers are allowed only in layers with ``draws``, whose masks are recorded and can be replayed.
    return any(hasattr(layer, "draws") for layer in model.modules())


def _refuse_other_outputs(first: Any, second: Any) -> None:
    for one, other in zip(tree_leaves(first), tree_leaves(second), strict=True):
        if not torch.equal(one, other):
            raise WorkloadError(
                "forward(batch) returned different outputs in two calls with the same weights and batch. It must not "
                "draw random numbers, count its calls or change the batch. Replace Dropout with "
                "plumbline.workloads.randomness.KeyedDropout, whose masks depend only on the samples, or set p=0"
            )


def _check_loss(workload: Workload, outputs: Any, batch: Batch) -> None:
    loss = loss_of(workload, outputs, batch)
    if not torch.equal(loss, loss_of(workload, outputs, batch)):
        raise WorkloadError("loss(outputs, batch) returned different values in two calls with the same arguments")
    leaves = [leaf.detach() for leaf in tree_leaves(outputs) if leaf.is_floating_point()]
    given = iter([leaf.requires_grad_() for leaf in leaves])
    alone = torch.utils._pytree.tree_map(lambda leaf: next(given) if leaf.is_floating_point() else leaf, outputs)
    loss = loss_of(workload, alone, batch)
    if not loss.requires_grad or not any(
        gradient is not None for gradient in torch.autograd.grad(loss, leaves, allow_unused=True)
    ):
        raise WorkloadError(
            "loss(outputs, batch) is not differentiable with respect to the outputs: compute it from them without "
            "detach(), item(), argmax() or no_grad()"
        )


def _check_every_parameter(model: nn.Module, gradients: Sequence[dict[str, Tensor]]) -> None:
    # DistributedDataParallel waits for the gradients of unused parameters, or raises.
    for name in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
        times = sum(name in gradient for gradient in gradients)
        if times < len(gradients):
            often = f"gets a gradient in {times} of {len(gradients)} batches" if times else "never gets a gradient"
            raise WorkloadError(
                f"parameter {name} {often}: use it in forward, freeze it with requires_grad_(False), or remove it. If "
                'it is unused on purpose, set unused_parameters = True and add "unused-parameters" to needs'
            )


def _check_optimizers(workload: Workload, model: nn.Module) -> None:
    with calling("optimizer(params)"):
        optimizers = workload.optimizers(model.parameters())
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"optimizer(params) returned {type(optimizer).__name__}: return a torch.optim.Optimizer"
            )
        with calling("scheduler(optimizer)"):
            workload.scheduler(optimizer)
    stepped = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and stepped.count(id(parameter)) != 1:
            times = stepped.count(id(parameter))
            raise WorkloadError(
                f"parameter {name} is in {times} optimizers: put every trained parameter into exactly one"
            )


def _needed(
    workload: Workload, model: nn.Module, outputs: Any, gradients: Sequence[dict[str, Tensor]]
) -> Iterator[tuple[str, str]]:
    optimizers = workload.optimizers(model.parameters())
    scheduled = any(workload.scheduler(optimizer) is not None for optimizer in optimizers)
    frozen = not all(parameter.requires_grad for parameter in model.parameters())
    sparse = any(gradient.is_sparse for each in gradients for gradient in each.values())
    for capability, needed, why in (
        ("accumulation", workload.accumulate > 1, f"accumulate is {workload.accumulate}"),
        ("clipping", workload.clip_norm is not None, f"clip_norm is {workload.clip_norm}"),
        ("scheduler", scheduled, "scheduler(optimizer) returns one"),
        ("several-optimizers", len(optimizers) > 1, f"optimizers(params) returns {len(optimizers)}"),
        ("validation", workload.validate_every is not None, f"validate_every is {workload.validate_every}"),
        ("checkpoint", workload.interrupt_after is not None, f"interrupt_after is {workload.interrupt_after}"),
        ("unused-parameters", workload.unused_parameters, "unused_parameters is True"),
        ("frozen-parameters", frozen, "the model has frozen parameters"),
        ("sparse-gradients", sparse, "the model has sparse gradients"),
        ("nested-outputs", not isinstance(outputs, Tensor), f"forward returns {type(outputs).__name__}"),
    ):
        if needed:
            yield capability, why


def _check_oracle(workload: Workload, devices: int) -> None:
    """Check that float64 gradients are computed in float64 and do not depend on the order of the samples."""
    batch = workload.dataset(devices, torch.float64).batch(range(workload.global_batch_size(devices)))
    exact = TrainingPass(workload, torch.float64)
    try:
        with NoNarrowing():
            right = exact.gradient(batch)
    except WorkloadError as error:
        raise WorkloadError(f"in float64, the precision of the oracle, {error}") from error
    if _draws(exact.model):
        return
    turned = exact.gradient({name: column.flip(0) for name, column in batch.items()})
    narrow = {name: column.float() if column.is_floating_point() else column for name, column in batch.items()}
    moved, noise = _distance(turned, right), _distance(TrainingPass(workload, torch.float32).gradient(narrow), right)
    if moved > _ACCURACY * noise:
        raise WorkloadError(
            f"the float64 gradient changes by {moved:.1e} if the samples of a batch are reversed; the float32 gradient "
            f"is {noise:.1e} away. The loss must not depend on the order of the samples, and all operations must "
            "compute in the dtype of their inputs"
        )


def _check_exact(workload: Workload, devices: int) -> None:
    single, double = (_trained(workload, devices, dtype) for dtype in (torch.float32, torch.float64))
    for name, value in single.items():
        if not torch.equal(value.double(), double[name]):
            raise WorkloadError(
                f"exact is True, but training in float32 and float64 gives different values of {name}: use small "
                "dyadic weights, data and learning rates and batch sizes that are powers of two, or set exact = False"
            )


def _trained(workload: Workload, devices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    whole = TrainingPass(workload, dtype)
    parameters = dict(whole.model.named_parameters())
    optimizers = workload.optimizers(whole.model.parameters())
    data, size = workload.dataset(devices, dtype), workload.global_batch_size(devices)
    for batch in [*_batches(data, size)] * workload.epochs:
        for name, gradient in whole.gradient(batch).items():
            parameters[name].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    parts = [one[name].to_dense().double() - other[name].to_dense() for name in other if name in one]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in parts])))
