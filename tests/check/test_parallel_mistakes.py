"""`plumbline check` names mistakes in parallel code from public trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_scenes import CopiedActivations, SummedActivations
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from plumbline.check.function import check_function
from plumbline.check.judge.script_checks import CheckedTraining
from plumbline.check.report.lines import coverage_lines
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


def without_reduction_of_a_layer() -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = network()
    fully_shard(model[0]).set_requires_gradient_sync(False)
    train(fully_shard(model), dist.get_rank())


def clipped_with_replicas_again() -> None:
    def clip(model: nn.Module) -> None:
        square = torch.stack([local(one.grad).square().sum() for one in model.parameters()]).sum()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, square.sqrt())

    train(sharded(2), dist.get_rank(), clip)


def clipped_shards() -> None:
    train(sharded(2), dist.get_rank(), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


class Block(nn.Module):
    """Two layers, the second of which is divided over all ranks, and a replicated norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        nn.init.zeros_(self.up.bias)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(functional.gelu(self.up(self.norm(values))))


class PartialInput(Block):
    """A block that uses its part of a weight by hand, so its input's gradient is never reduced."""

    def forward(self, values: Tensor) -> Tensor:
        inner = functional.linear(self.norm(values), local(self.up.weight), local(self.up.bias))
        return values + self.down(functional.gelu(inner))


class HalfPartialInput(Block):
    """Like ``PartialInput``, with a second use of the weight through which the gradient is reduced."""

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
    """Two blocks in halves, each on two of four ranks. Their inputs' gradients are not summed."""

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


class EqualHalves(Halves):
    """The same with halves that start with the same values, and so have equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        for layer in (*self.ups, *self.downs):
            nn.init.normal_(layer.weight)
        for up in self.ups:
            nn.init.zeros_(up.bias)

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for up, down in zip(self.ups, self.downs, strict=True):
            inner = down(functional.gelu(up(CopiedActivations.apply(values, self.group))))  # type: ignore[no-untyped-call]
            values = values + SummedActivations.apply(inner, self.group)  # type: ignore[no-untyped-call]
        return self.last(values)


def equal_halves() -> None:
    model = EqualHalves()
    train(model, dist.get_rank() // 2, lambda _: model.average())


class Rows(torch.autograd.Function):
    """Gathers all ranks' rows; the backward keeps own rows, summed over the ranks or not."""

    @staticmethod
    def forward(context: Any, values: Tensor, is_summed: bool) -> Tensor:
        context.is_summed = is_summed
        rows = values.new_empty(dist.get_world_size() * len(values), values.shape[-1])
        dist.all_gather_into_tensor(rows, values.contiguous())
        return rows

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        if context.is_summed:
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()], None


class OwnRows(torch.autograd.Function):
    """Keeps a rank's rows of the sum over ranks."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        rows = values.new_empty(len(values) // dist.get_world_size(), values.shape[-1])
        dist.reduce_scatter_tensor(rows, values.contiguous())
        return rows

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        rows = gradient.new_empty(dist.get_world_size() * len(gradient), gradient.shape[-1])
        dist.all_gather_into_tensor(rows, gradient.contiguous())
        return rows


class InSequence(nn.Module):
    """Sequence parallelism: ranks divide the rows between two tensor-parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        torch.manual_seed(2)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, values: Tensor) -> Tensor:
        inner = self.down(functional.gelu(self.inner(self.up(values))))
        own = self.norm(OwnRows.apply(inner))  # type: ignore[no-untyped-call]
        return self.last(Rows.apply(own, False))  # type: ignore[no-untyped-call]


def in_sequence() -> None:
    model = InSequence()
    train(model, 0, lambda _: [dist.all_reduce(one.grad) for one in model.norm.parameters()])


def in_sequence_not_reduced() -> None:
    train(InSequence(), 0)


class Towers(nn.Module):
    """Each rank has its own tower for all rows, with a norm that starts equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.own, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        torch.manual_seed(2)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, values: Tensor) -> Tensor:
        rows = Rows.apply(self.norm(torch.tanh(self.own(values))), True)  # type: ignore[no-untyped-call]
        return self.last(rows).view(-1, *values.shape[:-1], 4).mean(0) / len(values) ** 0.5


def summed_towers() -> None:
    """Train with the sum of the ranks' equal losses, each divided by the number of ranks."""
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows, targets = (torch.randn(8, width, generator=generator) for width in (WIDTH, 4))
        optimizer.zero_grad()
        (functional.mse_loss(model(rows), targets) / dist.get_world_size()).backward()
        for one in model.last.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()


class EqualStage(nn.Module):
    """A stage of a pipeline by hand. All ranks build it with the same seed."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False) if tied else None
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        if self.outer is not None and dist.get_rank() == 0:
            values = self.outer(values)
        values = self.inner(values)
        return values if self.outer is None or dist.get_rank() == 0 else self.outer(values)


def in_stages(*, tied: bool = False) -> None:
    stage = EqualStage(tied=tied)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows, targets = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            outputs = stage(rows)
            dist.send(outputs.detach(), 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, 1)
            outputs.backward(gradient)
        else:
            received = torch.empty(8, WIDTH)
            dist.recv(received, 0)
            functional.mse_loss(stage(received.requires_grad_()), targets).backward()
            dist.send(received.grad, 0)
        optimizer.step()


def in_stages_with_a_tied_weight() -> None:
    in_stages(tied=True)


def test_norms_of_sequence_parallelism_that_nobody_reduces_are_named() -> None:
    training = checked(in_sequence_not_reduced)
    (found,) = bad(training)
    assert (found.cause, found.parameter) == ("some-parameters-not-synchronised", "norm.weight")
    assert not any("norm" in one for one in coverage_lines(training.coverage, "float32"))  # these were judged


@pytest.mark.parametrize("training", [in_sequence, summed_towers])
def test_norms_of_parts_are_no_copies(training: Callable[[], None]) -> None:
    found = checked(training)
    assert not bad(found)
    assert answer_of(found) is Answer.RIGHT_IN_PART


def test_equal_parts_that_are_reduced_over_their_replicas_are_right() -> None:
    training = checked(equal_halves, 4)
    assert not bad(training)
    assert any("right for shards" in one.message for one in training.findings)


def test_equal_stages_of_a_pipeline_are_separate_layers() -> None:
    training = checked(in_stages)
    assert answer_of(training) is Answer.RIGHT
    assert any("different pipeline stages" in one.message for one in training.findings)


def test_equal_weights_at_different_places_of_stages_may_be_tied() -> None:
    assert answer_of(checked(in_stages_with_a_tied_weight)) is not Answer.RIGHT


def test_gradients_averaged_over_some_ranks_may_still_be_parts_of_a_sum() -> None:
    (found,) = bad(checked(halves_of_an_input, 4))
    assert (found.check, found.cause) == ("gradients", "exchanged-otherwise")


def test_experts_that_are_reduced_over_their_replicas_are_right() -> None:
    training = checked(experts_reduced, 4)
    assert not bad(training)
    assert answer_of(training) is Answer.RIGHT
    differing = [one.message for one in training.findings if one.check in ("initial-weights", "ranks-agree")]
    assert differing
    assert all("right if these ranks hold parts of one model" in message for message in differing)


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


@pytest.mark.parametrize(
    ("training", "ranks"), [(without_all_reduce, 4), (without_reduction, 2), (without_reduction_of_a_layer, 2)]
)
def test_a_reduction_that_is_switched_off_is_named(training: Callable[[], None], ranks: int) -> None:
    assert [(one.check, one.cause) for one in bad(checked(training, ranks))] == [
        ("gradients", "reduction-switched-off")
    ]


def test_a_norm_that_counts_replicas_again_is_named() -> None:
    found = bad(checked(clipped_with_replicas_again, 4))
    assert [(one.check, one.cause) for one in found] == [("clipping", "counted-again-in-the-norm")]


def test_the_norm_of_all_shards_is_right() -> None:
    assert not bad(checked(clipped_shards, 4))
