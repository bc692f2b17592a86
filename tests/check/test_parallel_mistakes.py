"""`plumbline check` names mistakes in parallel code that public trackers tell of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_scenes import SummedActivations
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from plumbline.check.function import check_function
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.verdict.verdict import Answer, answer_of
from plumbline.core.finding import Finding

WIDTH = 8
STEPS = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 4))


def train(model: nn.Module, seed: int, finish: Callable[[nn.Module], object] = lambda model: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows, targets = (torch.randn(8, width, generator=generator) for width in (WIDTH, 4))
        optimizer.zero_grad()
        functional.mse_loss(model(rows), targets).backward()
        finish(model)
        optimizer.step()


def checked(training: Callable[[], None], ranks: int = 2) -> CheckedTraining:
    check = check_function(training, ranks, steps=2)
    assert not any(end.has_failed for end in check.ends), check.ends
    (found,) = check.trainings
    return found


def bad(training: CheckedTraining) -> list[Finding]:
    return [one for one in training.findings if one.outcome.is_bad and one.consequence_of is None]


def local(gradient: Any) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def sharded(replicas: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, 2), ("replicate", "shard")) if replicas == 2 else ((2,), ("shard",))
    return fully_shard(network(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def without_all_reduce() -> None:
    model = sharded(2)
    model.set_requires_all_reduce(False)
    train(model, dist.get_rank())


def without_reduction() -> None:
    model = sharded(1)
    model.set_requires_gradient_sync(False)
    train(model, dist.get_rank())


def clipped_with_replicas_again() -> None:
    def clip(model: nn.Module) -> None:
        square = torch.stack([local(one.grad).square().sum() for one in model.parameters()]).sum()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, square.sqrt())

    train(sharded(2), dist.get_rank(), clip)


def clipped_shards() -> None:
    train(sharded(2), dist.get_rank(), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


class Block(nn.Module):
    """Two layers, the second of which lies on all ranks in parts, and a norm that every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        nn.init.zeros_(self.up.bias)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(functional.gelu(self.up(self.norm(values))))


class PartialInput(Block):
    """A block that computes with its part of a weight by hand, so that its input's gradient is never reduced."""

    def forward(self, values: Tensor) -> Tensor:
        inner = functional.linear(self.norm(values), local(self.up.weight), local(self.up.bias))
        return values + self.down(functional.gelu(inner))


class HalfPartialInput(Block):
    """The same beside a second use of the weight, through which the gradient of the input is reduced."""

    def forward(self, values: Tensor) -> Tensor:
        normed = self.norm(values)
        inner = functional.linear(normed, local(self.up.weight), local(self.up.bias)) + self.up(normed)
        return values + self.down(functional.gelu(inner))


def in_parts(*blocks: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks:
        parallelize_module(block, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def blocks(*kinds: type[Block]) -> nn.Module:
    torch.manual_seed(0)
    return in_parts(*(kind() for kind in kinds))


def averaged(model: nn.Module) -> None:
    for one in model.parameters():
        dist.all_reduce(local(one.grad))
        local(one.grad).div_(2)


def parts_averaged() -> None:
    train(blocks(Block, Block), 0, averaged)


def input_not_reduced() -> None:
    train(blocks(Block, PartialInput), 0)


def input_half_reduced() -> None:
    train(blocks(Block, HalfPartialInput), 0)


def batches_that_differ() -> None:
    train(blocks(Block, Block), dist.get_rank())


class Experts(nn.Module):
    """Two experts, each on two of four ranks. Every row goes to both."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))
        self.replicas, self.group = mesh["replicas"].get_group(), mesh["experts"].get_group()
        self.unreduced: tuple[str, ...] = ()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        torch.manual_seed(1 + mesh["experts"].get_local_rank())
        self.expert = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.expert.bias)

    def forward(self, values: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        def exchanged(rows: Tensor) -> Tensor:
            return all_to_all_single(torch.empty_like(rows), rows, group=self.group)

        sent = self.first(values).repeat(2, 1)
        returned = exchanged(functional.gelu(self.expert(exchanged(sent))))
        return self.last(returned.view(2, *values.shape).sum(0))

    def reduce(self, groups: Sequence[Any]) -> None:
        for name, one in self.named_parameters():
            for group in () if name in self.unreduced else groups if name.startswith("expert") else [None]:
                dist.all_reduce(one.grad, group=group)
            one.grad /= 4


def experts_reduced() -> None:
    model = Experts()
    train(model, dist.get_rank(), lambda _: model.reduce([model.replicas]))


def experts_not_reduced() -> None:
    model = Experts()
    train(model, dist.get_rank(), lambda _: model.reduce([]))


def experts_reduced_over_experts() -> None:
    model = Experts()
    train(model, dist.get_rank(), lambda _: model.reduce([model.group]))


def experts_biases_not_reduced() -> None:
    model = Experts()
    model.unreduced = ("expert.bias",)
    train(model, dist.get_rank(), lambda _: model.reduce([model.replicas]))


class Halves(nn.Module):
    """Two blocks in halves, each on two of four ranks. The gradients of their inputs are not added up."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "halves"))
        self.replicas, self.group = mesh["replicas"].get_group(), mesh["halves"].get_group()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        torch.manual_seed(1 + mesh["halves"].get_local_rank())
        self.ups = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for up, down in zip(self.ups, self.downs, strict=True):
            inner = down(functional.gelu(up(values)))
            values = values + SummedActivations.apply(inner, self.group)  # type: ignore[no-untyped-call]
        return self.last(values)

    def average(self) -> None:
        for one in self.parameters():
            dist.all_reduce(one.grad, group=self.replicas)
            one.grad /= 2


def halves_of_an_input() -> None:
    model = Halves()
    train(model, dist.get_rank() // 2, lambda _: model.average())


def test_gradients_averaged_over_some_ranks_may_still_be_parts_of_a_sum() -> None:
    (found,) = bad(checked(halves_of_an_input, 4))
    assert (found.check, found.cause) == ("gradients", "exchanged-otherwise")


def test_experts_that_are_reduced_over_their_replicas_are_right() -> None:
    training = checked(experts_reduced, 4)
    assert not bad(training)
    assert answer_of(training) is Answer.RIGHT


def test_parts_that_are_reduced_over_the_ranks_of_other_parts_are_named() -> None:
    (found, *_) = bad(checked(experts_reduced_over_experts, 4))
    assert found.cause == "blocks-averaged-with-each-other"


def test_constants_in_a_layer_of_parts_are_replicas_where_its_weight_is() -> None:
    (found,) = bad(checked(experts_biases_not_reduced, 4))
    assert (found.cause, found.parameter) == ("some-parameters-not-synchronised", "expert.bias")


def test_replicas_of_different_parts_that_nobody_reduces_are_named() -> None:
    (found,) = bad(checked(experts_not_reduced, 4))
    assert (found.cause, found.parameter) == ("some-parameters-not-synchronised", "expert.weight")


@pytest.mark.parametrize(
    ("training", "cause"),
    [
        (parts_averaged, "blocks-averaged-with-each-other"),
        (input_not_reduced, "parts-of-a-sum"),
        (input_half_reduced, "exchanged-otherwise"),
        (batches_that_differ, "replica-of-different-samples"),
    ],
)
def test_a_mistake_in_tensor_parallelism_is_named(training: Callable[[], None], cause: str) -> None:
    assert ("gradients", cause) in {(one.check, one.cause) for one in bad(checked(training))}


@pytest.mark.parametrize(("training", "ranks"), [(without_all_reduce, 4), (without_reduction, 2)])
def test_a_reduction_that_is_switched_off_is_named(training: Callable[[], None], ranks: int) -> None:
    assert [(one.check, one.cause) for one in bad(checked(training, ranks))] == [
        ("gradients", "reduction-switched-off")
    ]


def test_a_norm_that_counts_replicas_again_is_named() -> None:
    found = bad(checked(clipped_with_replicas_again, 4))
    assert [(one.check, one.cause) for one in found] == [("clipping", "counted-again-in-the-norm")]


def test_the_norm_of_all_shards_is_right() -> None:
    assert not bad(checked(clipped_shards, 4))
