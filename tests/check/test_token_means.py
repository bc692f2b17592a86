"""`plumbline check` on losses over all tokens of a step, with gradients divided after the backward passes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.function import CheckedFunction, check_function
from plumbline.core.outcome import Outcome

WORDS, IGNORED, CHUNKS = 16, -100, 4


@dataclass(frozen=True)
class Recipe:
    """``own_tokens``: each rank divides by its own number; ``extra`` is a factor that nothing explains.
    ``is_summed``: FSDP adds gradients up, and does not divide them. ``keeps_count``: the number of tokens is never set
    back to zero.
    """

    parallel: str = "ddp"
    chunked: bool = False
    micro_batches: int = 1
    own_tokens: bool = False
    extra: float = 1.0
    is_summed: bool = False
    one_left_out: bool = False
    keeps_count: bool = False


def train(recipe: Recipe) -> list[float]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS))
    model, data = _parallel(recipe, layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    chance, losses = torch.Generator().manual_seed(dist.get_rank() // (dist.get_world_size() // data)), []
    count = torch.zeros(())
    for _ in range(3):
        if not recipe.keeps_count:
            count.zero_()
        for _ in range(recipe.micro_batches):
            words, targets = (torch.randint(WORDS, (2, 12), generator=chance) for _ in range(2))
            targets[torch.rand(targets.shape, generator=chance) < 0.4] = IGNORED
            count += (targets != IGNORED).sum()
            loss = _summed(model(words), targets, CHUNKS if recipe.chunked else 1)
            loss.backward()
        losses.append(float(loss.detach()))
        if not recipe.own_tokens:
            dist.all_reduce(count)
            count *= data / dist.get_world_size()
        for one in model.parameters():
            one.grad *= data / count * recipe.extra
        if recipe.parallel != "fsdp+tp":  # its parameters are on several meshes
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _parallel(recipe: Recipe, layers: nn.Sequential) -> tuple[Any, int]:
    """Return the parallel model, and the number of data-parallel ranks over which gradients are averaged."""
    if recipe.parallel == "ddp":
        return DistributedDataParallel(layers), dist.get_world_size()
    if recipe.parallel == "fsdp":
        return fully_shard(layers), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(layers, mesh["tp"], plan)
    left_out = {next(layers.parameters())} if recipe.one_left_out else None
    model: Any = fully_shard(layers, mesh=mesh["dp"], ignored_params=left_out)
    if recipe.is_summed:
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    return model, 2


def _summed(logits: Tensor, targets: Tensor, chunks: int) -> Tensor:
    assert not isinstance(logits, DTensor)
    pairs = zip(logits.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True)
    return sum(
        functional.cross_entropy(own.flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=IGNORED)
        for own, wanted in pairs
    )  # type: ignore[return-value]


def check(world: int = 2, objective: str = "", steps: int = 2, **recipe: Any) -> CheckedFunction:
    more: dict[str, Any] = {"objective": objective} if objective else {}
    checked = check_function(partial(train, Recipe(**recipe)), world, steps=steps, **more)
    assert not any(end.has_failed for end in checked.ends), checked.ends
    return checked


def about(checked: CheckedFunction, name: str) -> list[str]:
    return [one.message for one in checked.findings if one.check == name]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_that_are_divided_by_all_tokens_are_right(parallel: str, chunked: bool) -> None:
    checked = check(parallel=parallel, chunked=chunked, micro_batches=2)
    checked.assert_right(require_full=True)
    assert any("as its loss requires" in message for message in about(checked, "gradients"))
    assert any(message.startswith("The loss is the mean over all ") for message in about(checked, "objective"))


def test_so_they_are_where_ranks_compute_one_forward_together() -> None:
    checked = check(4, parallel="fsdp+tp", chunked=True)
    checked.assert_right(require_full=True)
    assert any("as its loss requires" in message for message in about(checked, "gradients"))


@pytest.mark.parametrize(("world", "parallel"), [(2, "ddp"), (4, "fsdp+tp")])
def test_another_factor_is_told_and_not_judged(world: int, parallel: str) -> None:
    checked = check(world, parallel=parallel, extra=0.5)
    gradients = [one for one in checked.findings if one.check == "gradients"]
    assert {one.outcome for one in gradients} == {Outcome.SKIPPED}
    assert any("add up to 0.5 instead of 1" in one.message for one in gradients)
    (training,) = checked.trainings
    assert training.coverage.gradients.part == 0


@pytest.mark.parametrize(("extra", "outcome"), [(0.5, Outcome.PASSED), (1.0, Outcome.SKIPPED)])
def test_a_sum_that_a_script_asks_for_counts_in_the_factor(extra: float, outcome: Outcome) -> None:
    checked = check(4, parallel="fsdp+tp", extra=extra, is_summed=True)
    assert [one.outcome for one in checked.findings if one.check == "gradients"] == [outcome]


def test_shards_that_are_divided_by_the_own_tokens_are_named() -> None:
    causes = {one.cause for one in check(parallel="fsdp", own_tokens=True).findings if one.outcome.is_bad}
    assert "divided-by-own-count" in causes


def test_a_number_of_tokens_that_is_never_reset_is_named() -> None:
    bad = [one for one in check(steps=3, keeps_count=True).findings if one.outcome.is_bad]
    assert [(one.check, one.cause) for one in bad] == [("objective", "count-never-reset")]


def test_one_wrong_gradient_beside_the_factor_is_found() -> None:
    findings = check(4, parallel="fsdp+tp", one_left_out=True).findings
    wrong = [one for one in findings if one.check == "gradients" and one.outcome is Outcome.FAILED]
    assert [(one.parameter, one.cause) for one in wrong] == [("0.weight", "averaged-over-some-ranks")]


@pytest.mark.parametrize(("extra", "outcome"), [(1.0, Outcome.PASSED), (0.5, Outcome.SKIPPED)])
def test_a_declared_mean_over_tokens_is_confirmed_over_chunks(extra: float, outcome: Outcome) -> None:
    checked = check(objective="token-mean", chunked=True, extra=extra)
    assert [one.outcome for one in checked.findings if one.check == "objective"] == [outcome]
