"""Is a workload fit to judge trainers by? Each reason why it is not is a sentence, before anything is trained.

A trainer can be held only against a problem whose weights, data, outputs and loss are the same functions in every
process: whatever else a forward depends on would be found as the trainer's mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plumbline.core.errors import WorkloadError
from plumbline.core.precision import PRECISIONS
from plumbline.own_workloads.attempt import attempt
from plumbline.own_workloads.content import check_data, check_model
from plumbline.own_workloads.training_pass import NoNarrowing, TrainingPass, forward_of, loss_of, pass_of
from plumbline.subjects.declare import CAPABILITIES
from plumbline.workloads import Batch, Columns, Workload

_ACCURACY = (torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps) ** 0.5
"""The oracle's error over that of float32: nearer to 1 than this, it is not the error of float64 any more."""


def refuse_unfit(workload: Workload, devices: Sequence[int]) -> None:
    """Refuse a workload by which no trainer can be judged, on so many ``devices`` as a run has.

    Args:
        workload: one of the user's own, with the seed of the run.
        devices: numbers of devices of the run's cells, over all nodes.

    Raises:
        WorkloadError: the reason, and the way out.
    """
    check_numbers(workload)
    model = check_model(workload)
    every = [check_data(workload, count) for count in devices]
    batches = [*_batches(every[0], workload.global_batch_size(devices[0]))]
    _check_forward(workload, batches[0])
    for data, count in zip(every[1:], devices[1:], strict=True):
        _check_shares(workload, data, count)
    first = TrainingPass(workload, torch.float32)
    gradients = [first.gradient(batch) for batch in batches]
    if not workload.unused_parameters:
        _check_every_parameter(first.model, gradients)
    _check_optimizers(workload, model)
    outputs = forward_of(first.model, batches[0])
    _check_needs(workload, dict(_needed(workload, first.model, outputs, gradients)))
    _check_oracle(workload, devices[0])
    if workload.exact:
        _check_exact(workload, devices[0])


def check_numbers(workload: Workload) -> None:
    for name in ("batch_size", "steps_per_epoch", "epochs", "accumulate"):
        value = getattr(workload, name)
        if not isinstance(value, int) or value < 1:
            raise WorkloadError(f"{name} is {value!r}: it must be a whole number, 1 or more")
    for what, given, known in (
        ("capability", workload.needs, CAPABILITIES),
        ("precision", workload.precisions, PRECISIONS),
    ):
        for name in given:
            if name not in known:
                raise WorkloadError(f"there is no {what} {name!r}: there are {', '.join(sorted(known))}")
    if workload.clip_norm is not None and not workload.clip_norm > 0:
        raise WorkloadError(f"clip_norm is {workload.clip_norm!r}: it must be larger than 0, or None")


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
            f"forward(batch) returns {type(outputs).__name__}: it must return a tensor with the batch in dim 0, or a "
            "dict, list or tuple of such"
        )
    for tensor in tensors:
        if tensor.dim() and len(tensor) != count:
            raise WorkloadError(
                f"forward(batch) returns a tensor of shape {list(tensor.shape)} for {count} samples: dim 0 must be "
                "the batch, because dp gathers the outputs of devices along it"
            )
    _check_loss(workload, outputs, batch)
    if not _draws(model):
        _refuse_other_outputs(outputs, forward_of(model, batch))


def _check_shares(workload: Workload, data: Columns, devices: int) -> None:
    size = workload.global_batch_size(devices) // devices
    try:
        pass_of(workload, workload.model().train(), data.batch(range(size)))
    except WorkloadError as error:
        raise WorkloadError(
            f"each of {devices} devices has {size} samples of a batch, and with so few {error}"
        ) from error


def _draws(model: nn.Module) -> bool:
    """Return whether layers draw random numbers in the way that is recorded: a forward repeats only with those."""
    return any(hasattr(layer, "draws") for layer in model.modules())


def _refuse_other_outputs(first: Any, second: Any) -> None:
    for one, other in zip(tree_leaves(first), tree_leaves(second), strict=True):
        if not torch.equal(one, other):
            raise WorkloadError(
                "forward(batch) returns something else in a second call with the same weights and batch, so nobody can "
                "say what is right. Does it draw random numbers, as Dropout does, count its calls, or change the "
                "batch? Set p=0, or use plumbline.workloads.randomness.KeyedDropout: its masks follow from the samples"
            )


def _check_loss(workload: Workload, outputs: Any, batch: Batch) -> None:
    loss = loss_of(workload, outputs, batch)
    if not torch.equal(loss, loss_of(workload, outputs, batch)):
        raise WorkloadError("loss(outputs, batch) returns another number in a second call with the same arguments")
    leaves = [leaf.detach() for leaf in tree_leaves(outputs) if leaf.is_floating_point()]
    given = iter([leaf.requires_grad_() for leaf in leaves])
    alone = torch.utils._pytree.tree_map(lambda leaf: next(given) if leaf.is_floating_point() else leaf, outputs)
    loss = loss_of(workload, alone, batch)
    if not loss.requires_grad or not any(
        gradient is not None for gradient in torch.autograd.grad(loss, leaves, allow_unused=True)
    ):
        raise WorkloadError(
            "loss(outputs, batch) is no differentiable function of the outputs: does it use them, without detach(), "
            "item(), argmax() or no_grad()?"
        )


def _check_every_parameter(model: nn.Module, gradients: Sequence[dict[str, Tensor]]) -> None:
    """Refuse a parameter that a batch does not use: DistributedDataParallel waits for its gradient, or raises."""
    for name in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
        times = sum(name in gradient for gradient in gradients)
        if times < len(gradients):
            often = f"gets a gradient in {times} of {len(gradients)} batches" if times else "never gets a gradient"
            raise WorkloadError(
                f"parameter {name} {often}: use it in forward, freeze it (requires_grad_(False)), or leave it out; if "
                'it is meant to be unused, set unused_parameters = True and name "unused-parameters" in needs'
            )


def _check_optimizers(workload: Workload, model: nn.Module) -> None:
    with attempt("optimizer(params)"):
        optimizers = workload.optimizers(model.parameters())
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(f"optimizer(params) returns {type(optimizer).__name__}: it must be a torch.optim one")
        with attempt("scheduler(optimizer)"):
            workload.scheduler(optimizer)
    stepped = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and stepped.count(id(parameter)) != 1:
            times = stepped.count(id(parameter))
            raise WorkloadError(
                f"parameter {name} is in {times} optimizers: each that is trained must be in exactly one"
            )


def _needed(
    workload: Workload, model: nn.Module, outputs: Any, gradients: Sequence[dict[str, Tensor]]
) -> Iterator[tuple[str, str]]:
    optimizers = workload.optimizers(model.parameters())
    if workload.accumulate > 1:
        yield "accumulation", f"accumulate is {workload.accumulate}"
    if workload.clip_norm is not None:
        yield "clipping", f"clip_norm is {workload.clip_norm}"
    if any(workload.scheduler(optimizer) is not None for optimizer in optimizers):
        yield "scheduler", "scheduler(optimizer) returns one"
    if len(optimizers) > 1:
        yield "several-optimizers", f"optimizers(params) returns {len(optimizers)}"
    if workload.validate_every is not None:
        yield "validation", f"validate_every is {workload.validate_every}"
    if workload.interrupt_after is not None:
        yield "checkpoint", f"interrupt_after is {workload.interrupt_after}"
    if workload.unused_parameters:
        yield "unused-parameters", "unused_parameters is True"
    if not all(parameter.requires_grad for parameter in model.parameters()):
        yield "frozen-parameters", "the model has frozen parameters"
    if any(gradient.is_sparse for each in gradients for gradient in each.values()):
        yield "sparse-gradients", "the model has sparse gradients"
    if not isinstance(outputs, Tensor):
        yield "nested-outputs", f"forward returns {type(outputs).__name__}"


def _check_needs(workload: Workload, needed: dict[str, str]) -> None:
    for capability, why in needed.items():
        if capability not in workload.needs:
            raise WorkloadError(
                f'{why}, and needs does not name "{capability}": a trainer that never said it could do this would be '
                f'called wrong. Set needs = frozenset({{"{capability}", …}})'
            )


def _check_oracle(workload: Workload, devices: int) -> None:
    """Refuse a gradient that is not computed in float64 where model and data are, or depends on the samples' order."""
    batch = workload.dataset(devices, torch.float64).batch(range(workload.global_batch_size(devices)))
    exact = TrainingPass(workload, torch.float64)
    try:
        with NoNarrowing():
            right = exact.gradient(batch)
    except WorkloadError as error:
        raise WorkloadError(f"in float64, in which the oracle computes, {error}") from error
    if _draws(exact.model):
        return
    turned = exact.gradient({name: column.flip(0) for name, column in batch.items()})
    narrow = {name: column.float() if column.is_floating_point() else column for name, column in batch.items()}
    moved, noise = _distance(turned, right), _distance(TrainingPass(workload, torch.float32).gradient(narrow), right)
    if moved > _ACCURACY * noise:
        raise WorkloadError(
            f"the oracle is not stable: in float64 the gradient moves by {moved:.1e} when the samples of a batch are "
            f"turned round, and float32 is {noise:.1e} away. Does the loss depend on the order of the samples, or does "
            "an operation compute in less than float64?"
        )


def _check_exact(workload: Workload, devices: int) -> None:
    single, double = (_trained(workload, devices, dtype) for dtype in (torch.float32, torch.float64))
    for name, value in single.items():
        if not torch.equal(value.double(), double[name]):
            raise WorkloadError(
                f"exact is True, and after training in float32 {name} is not what it is in float64: use small dyadic "
                "weights, data and learning rates, and batches of a power of two, or set exact = False"
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
