"""Observers on real torch objects in one process: they take notes, and change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset, dataloader

from plumbline.check.rank.observers.generators import GeneratorObserver
from plumbline.check.rank.observers.loaders import HEAD, LoaderObserver
from plumbline.check.rank.observers.parallelism import ParallelismObserver
from plumbline.check.rank.observers.ties import TieObserver
from plumbline.check.rank.tensor_digest import SMALL, digest_and_projection, tensor_digest
from plumbline.recording.observer import Facts, Observer, Observers
from plumbline.recording.parameters import ParameterNames


@pytest.fixture
def loaders() -> Iterator[LoaderObserver]:
    """An observer of loaders, whose patches are undone afterwards."""
    owners: list[Any] = [DistributedSampler, RandomSampler, DataLoader]
    kept = [(owner, "__iter__", owner.__iter__) for owner in owners]
    base: Any = dataloader._BaseDataLoaderIter
    kept.append((base, "__next__", base.__next__))
    observer = LoaderObserver()
    observer.install()
    yield observer
    for owner, name, function in kept:
        setattr(owner, name, function)


@pytest.fixture
def ties() -> Iterator[TieObserver]:
    """An observer of tied weights, whose patches are undone afterwards."""
    owners: list[Any] = [nn.Module, nn.Module, nn.Parameter, torch.utils]
    names = ("register_parameter", "load_state_dict", "__deepcopy__", "swap_tensors")
    kept = [(owner, name, getattr(owner, name)) for owner, name in zip(owners, names, strict=True)]
    observer = TieObserver(ParameterNames())
    observer.install()
    yield observer
    for owner, name, function in kept:
        setattr(owner, name, function)


def test_tied_weights_stay_known_where_a_script_lets_torch_swap_them(ties: TieObserver) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert ties.is_tied(first.weight)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()  # torch rejects tensors with weak references
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert first.weight is second.weight
    assert first.weight.dtype == torch.float64
    assert ties.is_tied(first.weight)
    assert not ties.is_tied(first.bias)


def test_a_mesh_may_be_given_by_name() -> None:
    """As in torch's own examples, and as in ``init_device_mesh`` of torch 2.4."""

    def init(one: Any, device_type: str, mesh: Any) -> None:
        one.mesh, one.mesh_dim_names = mesh, ("data", "tensor")

    observer = ParallelismObserver()
    observer._around_mesh(init, SimpleNamespace(), device_type="cpu", mesh=torch.arange(4).reshape(2, 2))
    assert observer._meshes == [{"shape": [2, 2], "names": ["data", "tensor"]}]


def batches(workers: int = 0, seed: int = 5) -> list[list[float]]:
    torch.manual_seed(seed)
    data = TensorDataset(torch.arange(100.0))
    # Both draws come from the global generator: their order shows whether an observer moved one.
    loader = DataLoader(data, 7, shuffle=True, num_workers=workers)
    return [[*batch.tolist(), float(torch.rand(()))] for (batch,) in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_orders_and_random_numbers_stay_as_they_were(request: pytest.FixtureRequest, workers: int) -> None:
    plain = batches(workers)
    observer = request.getfixturevalue("loaders")
    observer.start()
    assert batches(workers) == plain


def test_a_pass_is_noted_with_its_settings(loaders: LoaderObserver) -> None:
    data = TensorDataset(torch.arange(200.0))
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(list(DataLoader(data, 10, sampler=sampler))) == 10
    first, second = (loaders.final_facts() or {})["samplers"]
    assert {name: first[name] for name in ("rank", "num_replicas", "seed", "shuffle", "length", "count", "epoch")} == {
        "rank": 1, "num_replicas": 2, "seed": 3, "shuffle": True, "length": 200, "count": HEAD, "epoch": 0,
    }  # fmt: skip
    assert first["complete"]
    assert first["sampler"] == second["sampler"]
    assert first["head"] != second["head"]


def test_a_pass_that_is_broken_off_is_not_complete(loaders: LoaderObserver) -> None:
    next(iter(DataLoader(TensorDataset(torch.arange(200.0)), 10, shuffle=True)))
    (noted,) = (loaders.final_facts() or {})["samplers"]
    assert not noted["complete"]


def test_samplers_with_an_order_of_their_own_are_followed(loaders: LoaderObserver) -> None:
    class Backwards(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(list(super().__iter__())[::-1])

    class Buckets(Sampler[list[int]]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[3, 1], [2, 0]])

    data = TensorDataset(torch.arange(20.0))
    backwards = DataLoader(data, 5, sampler=Backwards(data, num_replicas=1, rank=0))
    for loader in (backwards, DataLoader(data, 5, sampler=DistributedSampler(data, num_replicas=1, rank=0))):
        list(loader)
    for workers in (0, 1):
        assert len(list(DataLoader(data, batch_sampler=Buckets(), num_workers=workers))) == 2
    noted = [one for one in (loaders.final_facts() or {})["samplers"] if one["count"]]  # workers' loaders start twice
    assert [(one["class"], one["distributed"], one["torch"], one["count"]) for one in noted] == [
        ("Backwards", True, False, 20),
        ("DistributedSampler", True, True, 20),
        ("Buckets", False, False, 2),
        ("Buckets", False, False, 2),
    ]
    assert noted[2]["head"] == noted[3]["head"]


def test_steps_in_a_pass_are_counted(loaders: LoaderObserver) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.rand(20, 1)), 5, shuffle=True)
    loaders.start()
    for epoch in range(3):
        for (inputs,) in loader:
            model(inputs).sum().backward()
            loaders.before_step(optimizer)
            if epoch < 2:
                optimizer.step()
            optimizer.zero_grad()
    assert [one["steps"] for one in (loaders.final_facts() or {})["samplers"]] == [4, 4, 0]


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_after_the_recorded_steps_are_written_as_they_end(loaders: LoaderObserver, workers: int) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.rand(20, 1)), 5, shuffle=True, num_workers=workers)
    written: list[list[int]] = []

    def write() -> None:
        written.append([one["steps"] for one in (loaders.final_facts() or {})["samplers"] if one["complete"]])

    loaders.start()
    for _ in range(3):
        for (inputs,) in loader:
            model(inputs).sum().backward()
            loaders.before_step(optimizer)
            loaders.stop()
            loaders.after_recording(write)
            optimizer.step()
    assert written == [[4], [4, 4], [4, 4, 4]]


def test_a_look_at_a_batch_is_no_epoch_with_steps(loaders: LoaderObserver) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.rand(20, 1)), 5, shuffle=True)
    loaders.start()
    for _ in range(3):
        (inputs,) = next(iter(loader))
        model(inputs).sum().backward()
        loaders.before_step(optimizer)
        optimizer.step()
    assert {one["steps"] for one in (loaders.final_facts() or {})["samplers"]} == {0}


def test_the_batch_that_was_fetched_last_is_known_only_while_recording(loaders: LoaderObserver) -> None:
    iterator = iter(DataLoader(TensorDataset(torch.rand(20, 1)), 5, shuffle=True))
    next(iterator)
    assert loaders.origin_of([]) is None
    loaders.start()
    next(iterator)
    assert loaders.origin_of([]) == {"loader": 0, "pass": 0, "sampler": 0, "batch": 1}
    loaders.stop()
    assert loaders.origin_of([]) is None


def test_batches_that_are_fetched_in_advance_are_told_apart(loaders: LoaderObserver) -> None:
    loaders.start()
    masked = TensorDataset(torch.rand(20, 3), torch.ones(20, 3))
    (first, mask), (second, _) = itertools.islice(DataLoader(masked, 5), 2)
    origins = [
        loaders.origin_of(list(own)) for own in ((first[:, :2],), (second, mask), (first.clone(), mask), (mask * 1,))
    ]
    assert [one and one["batch"] for one in origins] == [1, 2, 1, 2]


def test_a_forward_that_draws_is_known() -> None:
    observer = GeneratorObserver()
    layer = nn.Linear(2, 2)
    for draw in (False, True):
        observer.forward_begins(layer, (), {})
        if draw:
            torch.rand(1)
        observer.forward_ends()
        torch.rand(1)  # like labels that the script draws: not part of the forward
        observer.backward_begins(0, ())
    first, second = (observer.backward_ends(0) or {})["forwards"]
    assert (first["drew"], second["drew"]) == ([], ["torch"])


def test_a_pass_may_end_inside_of_a_forward() -> None:
    observer = GeneratorObserver()
    layer = nn.Linear(2, 2)
    observer.backward_begins(0, ())
    observer.forward_begins(layer, (), {})
    observer.backward_ends(0)
    observer.forward_ends()
    observer.forward_begins(layer, (), {})
    observer.forward_ends()
    observer.backward_begins(1, ())
    assert len((observer.backward_ends(1) or {})["forwards"]) == 1


def test_dropout_in_evaluation_mode_is_noted_if_a_whole_module_that_is_trained_is_in_it() -> None:
    def idle(*forwards: Callable[[nn.Sequential], Any]) -> list[str]:
        observer = GeneratorObserver()
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Dropout(0.0), nn.Linear(2, 2))
        for change in forwards:
            change(model.train())
            observer.forward_begins(model, (), {})
        facts = observer.after_step(torch.optim.SGD(model.parameters(), 0.1), skipped=False)
        return list((facts or {})["idle"])

    assert idle(lambda model: model.eval()) == idle(lambda model: model[0].eval()) == ["0.1"]
    assert idle(lambda model: model) == idle(lambda model: model[0][1].eval()) == []
    assert idle(lambda model: model.eval(), lambda model: model) == []  # as in adversarial training
    assert idle(lambda model: model[0].requires_grad_(False).eval()) == []


def test_dropout_of_a_frozen_teacher_in_training_mode_is_noted() -> None:
    def noisy(change: Callable[[nn.Module], Any]) -> list[str]:
        observer = GeneratorObserver()
        observer.start()
        teacher = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).requires_grad_(False)
        change(teacher)
        observer.constant_called(teacher)
        facts = observer.after_step(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), skipped=False)
        return list((facts or {})["noisy"])

    assert noisy(lambda teacher: teacher.train()) == ["Sequential.1"]
    assert noisy(lambda teacher: teacher.eval()) == []
    assert noisy(lambda teacher: teacher.train().requires_grad_(True)) == []  # as where rewards are computed


def test_states_are_read_and_not_moved() -> None:
    layer = nn.Linear(2, 2)
    before = torch.get_rng_state()
    GeneratorObserver().forward_begins(layer, (), {})
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [1, 100, SMALL, SMALL + 1, 3 * SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_projection_is_as_far_as_the_weights(size: int, dtype: torch.dtype) -> None:
    weights = torch.randn(size).to(dtype)
    moved = (weights.double() * 1.01).to(dtype)
    (one, first), (other, second) = digest_and_projection(weights), digest_and_projection(moved)
    assert one != other
    assert one == digest_and_projection(weights.clone())[0]
    left, right = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    distance = float((left - right).norm() / left.norm())
    true = float((weights.double() - moved.double()).norm() / weights.double().norm())
    # Rounding is not a multiple of the weights; eight random projections give its norm up to a factor.
    assert true / 4 < distance < true * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.tensor(3),
        torch.empty(0),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(4, 4).t(),
        torch.randint(9, (5000,)),
        torch.ones(4).to(torch.float8_e4m3fn),
    ],
)
def test_tensors_of_every_kind_have_a_digest(tensor: torch.Tensor) -> None:
    assert tensor_digest(tensor) == tensor_digest(tensor.clone()) is not None


def test_tensors_without_values_have_none() -> None:
    assert tensor_digest(torch.empty(3, device="meta")) is None
    assert tensor_digest(torch.eye(3).to_sparse()) is None


def test_an_observer_that_fails_stops_alone() -> None:
    class Broken(Observer):
        name = "broken"
        stopped = False

        def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise ValueError("no")

        def stop(self) -> None:
            self.stopped = True

    class Well(Observer):
        name = "well"

        def backward_ends(self, number: int) -> Facts | None:
            return {"pass": number}

    broken = Broken()
    well = Well()
    observers = Observers([broken, well])
    observers.tell(lambda one: one.forward_begins(nn.Linear(1, 1), (), {}))
    assert observers.tell(lambda one: one.backward_ends(0)) == {"well": {"pass": 0}}
    observers.stop()
    assert broken.stopped
    assert observers.final_facts() == {"broken": {"error": "ValueError: no"}}

    broken.essential = True
    with pytest.raises(ValueError, match="no"):
        Observers([broken, well]).tell(lambda one: one.forward_begins(nn.Linear(1, 1), (), {}))
