"""Trainings of two ranks on gloo, right and wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it; import it once here instead of on each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))

from observed import Observed

from plumbline.check.evidence.training import RecordedRank
from plumbline.check.rank.install import training_observers
from plumbline.recording.parameters import ParameterNames

WORLD = 2


class CopiedActivations(torch.autograd.Function):
    """Copies activations to every rank of a group; the backward sums gradients over the group."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        context.group = group
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class SummedActivations(torch.autograd.Function):
    """Sums a group's activations; the backward passes the gradient on unchanged."""

    @staticmethod
    def forward(context: Any, values: Tensor, group: Any) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _data(rows: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator))


def _model(seed: int = 0, *, norm: bool = False, dropout: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(8) if norm else nn.Dropout(0.5) if dropout else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3))


def _wrapped(recorder: Observed, model: nn.Module, **options: Any) -> DistributedDataParallel:
    recorder.follow(model)
    return DistributedDataParallel(model, **options)


def _sampler(data: TensorDataset, rank: int, seed: int = 0) -> DistributedSampler[Any]:
    return DistributedSampler(data, num_replicas=WORLD, rank=rank, seed=seed)


def _fit(
    recorder: Observed,
    model: nn.Module,
    loader: Any,
    *,
    epochs: int = 1,
    set_epoch: bool = True,
    accumulate: int = 1,
    divisor: float = 1,
    after_backward: Callable[[], None] = lambda: None,
    before_step: Callable[[], None] = lambda: None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        if set_epoch and hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            loss = functional.cross_entropy(model(inputs), targets)
            recorder.backward(loss / divisor, optimizer)
            if (index + 1) % accumulate == 0:
                after_backward()
                recorder.step(optimizer)
                before_step()


def right(recorder: Observed, rank: int) -> None:
    data = _data()
    model = _wrapped(recorder, _model(rank, norm=True))
    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)), epochs=2)


def right_accumulation(recorder: Observed, rank: int) -> None:
    data = _data()
    loader = DataLoader(data, 4, sampler=_sampler(data, rank))
    _fit(recorder, _wrapped(recorder, _model(dropout=True)), loader, accumulate=3, divisor=3)


def right_by_hand(recorder: Observed, rank: int) -> None:
    model, data = _model(), _data()
    recorder.follow(model)
    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)), after_backward=_averaging(model))


def right_alone(recorder: Observed, rank: int) -> None:
    """Each rank trains its own model on the same data: a search over seeds."""
    model = _model(rank)
    recorder.follow(model)
    _fit(recorder, model, DataLoader(_data(), 4))


def right_benchmark(recorder: Observed, rank: int) -> None:
    """Uses the same batch on all ranks and in all steps, to measure speed."""
    torch.manual_seed(3)
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    _fit(recorder, _wrapped(recorder, _model()), [batch] * 4)


def right_few_tokens(recorder: Observed, rank: int) -> None:
    """Inputs have few different rows, so equal ones occur by chance."""
    generator = torch.Generator().manual_seed(rank)

    def draw() -> Tensor:
        return torch.randint(2, (4, 6), generator=generator) * torch.tensor([1.0, 0, 0, 0, 0, 0])

    _fit(recorder, _wrapped(recorder, _model()), [(draw(), torch.randint(3, (4,))) for _ in range(6)])


def right_two_losses(recorder: Observed, rank: int) -> None:
    """A discriminator: two backward passes a step add up to one loss."""
    data = _data()
    model = _wrapped(recorder, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(data, 4, sampler=_sampler(data, rank)):
        recorder.backward(functional.cross_entropy(model(inputs), targets), optimizer)
        recorder.backward(functional.cross_entropy(model(torch.randn(4, 6) + rank), targets), optimizer)
        recorder.step(optimizer)


def right_evaluated_on_training_data(recorder: Observed, rank: int) -> None:
    """Evaluates on the same loader after an epoch: the order may be the same."""
    data = _data()
    loader = DataLoader(data, 4, sampler=_sampler(data, rank))
    model = _wrapped(recorder, _model())
    _fit(recorder, model, loader)
    for inputs, _ in loader:
        with torch.no_grad():
            model(inputs)


def right_sharded(recorder: Observed, rank: int) -> None:
    data = _data()
    model = _sharded(recorder)
    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)))


def right_tensor_parallel(recorder: Observed, rank: int) -> None:
    """All ranks see the same rows, and each has a part of the weights."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    recorder.follow(model)
    _fit(recorder, model, DataLoader(_data(), 4))


def no_sampler(recorder: Observed, rank: int) -> None:
    _fit(recorder, _wrapped(recorder, _model()), DataLoader(_data(), 4))


def sharded_without_sampler(recorder: Observed, rank: int) -> None:
    _fit(recorder, _sharded(recorder), DataLoader(_data(), 4))


def same_rank(recorder: Observed, rank: int) -> None:
    data = _data()
    _fit(recorder, _wrapped(recorder, _model()), DataLoader(data, 4, sampler=_sampler(data, 0)))


def seeds_differ(recorder: Observed, rank: int) -> None:
    data = _data()
    _fit(recorder, _wrapped(recorder, _model()), DataLoader(data, 4, sampler=_sampler(data, rank, seed=rank)))


def whole_data(recorder: Observed, rank: int) -> None:
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    _fit(recorder, _wrapped(recorder, _model()), DataLoader(_data(96), 8, shuffle=True, generator=generator))


def no_set_epoch(recorder: Observed, rank: int) -> None:
    data = _data()
    loader = DataLoader(data, 4, sampler=_sampler(data, rank))
    _fit(recorder, _wrapped(recorder, _model()), loader, epochs=2, set_epoch=False)


def not_divided(recorder: Observed, rank: int) -> None:
    data = _data()
    loader = DataLoader(data, 4, sampler=_sampler(data, rank))
    _fit(recorder, _wrapped(recorder, _model()), loader, accumulate=3)


def not_divided_and_fetched_in_advance(recorder: Observed, rank: int) -> None:
    """Fetches all micro-batches in advance, like trainers that count a step's labels first."""
    data = _data()
    loader = DataLoader(data, 4, sampler=_sampler(data, rank))
    _fit(recorder, _wrapped(recorder, _model()), list(loader), accumulate=3)


def divided_twice(recorder: Observed, rank: int) -> None:
    data = _data()
    loader = DataLoader(data, 4, sampler=_sampler(data, rank))
    _fit(recorder, _wrapped(recorder, _model()), loader, accumulate=3, divisor=9)


def biases_differ(recorder: Observed, rank: int) -> None:
    data = _data()
    model = _wrapped(recorder, _model())
    with torch.no_grad():
        model.module[2].bias += rank
    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)))


def never_broadcast(recorder: Observed, rank: int) -> None:
    data = _data()
    model = _model(rank)
    recorder.follow(model)
    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)), after_backward=_averaging(model))


def changed_between(recorder: Observed, rank: int) -> None:
    data = _data()
    model = _wrapped(recorder, _model())

    def nudge() -> None:
        with torch.no_grad():
            model.module[0].weight += 0.01 * rank

    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)), before_step=nudge)


def overflow_in_statistics(recorder: Observed, rank: int) -> None:
    data = _data()
    data.tensors[0][5] = torch.nan
    _fit(recorder, _wrapped(recorder, _model(norm=True)), DataLoader(data, 4, sampler=_sampler(data, rank)))


def own_statistics(recorder: Observed, rank: int) -> None:
    data = _data()
    model = _wrapped(recorder, _model(norm=True), broadcast_buffers=False)
    _fit(recorder, model, DataLoader(data, 4, sampler=_sampler(data, rank)))


def _sharded(recorder: Observed) -> nn.Module:
    model = _model()
    for part in (model[0], model[2], model):
        fully_shard(part)
    recorder.follow(model)
    return model


def _averaging(model: nn.Module) -> Callable[[], None]:
    def average() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD

    return average


def _scenes() -> Iterator[Callable[[Observed, int], None]]:
    for name, scene in list(globals().items()):
        if callable(scene) and getattr(scene, "__annotations__", {}).get("recorder") == "Observed" and name[0] != "_":
            yield scene


def train(rank: int) -> dict[str, RecordedRank]:
    """Train every scene on a rank of the current process group, and return the recordings."""
    kept = {}
    for scene in _scenes():
        observers = training_observers(ParameterNames())
        for observer in observers:
            observer.install()
        recorder = Observed(observers)
        torch.manual_seed(100 + rank)
        scene(recorder, rank)
        kept[scene.__name__] = recorder.finish()
    return kept
