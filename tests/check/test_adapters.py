"""`plumbline check` on adapters beside frozen weights: which are added, when, and which ranks train them.

Public threads report the mistakes: huggingface/transformers#48873 (added after ``fully_shard``, each rank trains its
own), hao-ai-lab/FastVideo#1666 (as DTensors that say Replicate), modelscope/mcore-bridge#173 (one rank's part).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.function import CheckedFunction, check_function
from plumbline.check.judge.noted import HeadlineNote
from plumbline.check.verdict.verdict import Answer

STEPS = 4


class Adapted(nn.Module):
    """A frozen layer plus a trainable low-rank product."""

    def __init__(self, base: nn.Module, seed: int = 7) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 6, generator=torch.Generator().manual_seed(seed)))
        self.up = nn.Parameter(torch.zeros(8, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        down, up = (one.to_local() if isinstance(one, DTensor) else one for one in (self.down, self.up))
        return self.base(inputs) + linear(linear(inputs, down), up)


def pretrained(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def adapt(model: Any, seed: int = 7) -> Any:
    model[0] = Adapted(model[0], seed)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), 0.01, weight_decay=0.1)


def fit(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    before: Callable[[int], None] = lambda step: None,
    after_backward: Callable[[], None] = lambda: None,
    after: Callable[[int], None] = lambda step: None,
    set_to_none: bool = True,
) -> None:
    torch.manual_seed(1 + dist.get_rank() if dist.is_initialized() else 0)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        before(step)
        cross_entropy(model(torch.randn(4, 6)), torch.randint(4, (4,))).backward()
        after_backward()
        optimizer.step()
        after(step)


def averaged(model: nn.Module) -> nn.Module:
    """Average gradients over the ranks as they arrive."""

    for one in trainable(model):
        one.register_post_accumulate_grad_hook(average)
    return model


def average(parameter: Tensor) -> None:
    gradient: Any = parameter.grad
    gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()


def added_after_the_optimizer() -> None:
    model = pretrained()
    optimizer = adamw(model)
    fit(DistributedDataParallel(adapt(model)), optimizer)


def another_chosen_after_the_optimizer() -> None:
    """As PEFT's ``set_adapter`` does: it freezes the adapter that the optimizer holds, and trains another one."""
    model = adapt(pretrained())
    model[2].requires_grad_(False)
    optimizer = adamw(model)
    fit(DistributedDataParallel(adapt(model, seed=8)), optimizer)


def added_after_the_wrapper() -> None:
    model = pretrained()
    wrapped = DistributedDataParallel(model)
    model[0], model[2] = Adapted(model[0]), model[2].requires_grad_(False)
    fit(wrapped, adamw(model))


def unfrozen_after_the_wrapper() -> None:
    model = adapt(pretrained())
    wrapped = DistributedDataParallel(model)
    model[0].base.requires_grad_(True)
    fit(wrapped, adamw(model))


def added_after_sharding(*, seed: int | None = None, replicated: bool = False, synchronised: bool = False) -> None:
    """Like huggingface/transformers#48873; with ``replicated``, like hao-ai-lab/FastVideo#1666."""
    model = pretrained().requires_grad_(False)
    for one in (model[0], model[2], model):
        fully_shard(one)
    adapt(model, dist.get_rank() if seed is None else seed)
    for name in ("down", "up") if replicated else ():
        value = DTensor.from_local(getattr(model[0], name).data, init_device_mesh("cpu", (2,)), [Replicate()])
        setattr(model[0], name, nn.Parameter(value))
    fit(averaged(model) if synchronised else model, adamw(model))


def frozen_weights_of_each_rank() -> None:
    model = adapt(pretrained(dist.get_rank()))
    model[2].requires_grad_(False)
    fit(averaged(model), adamw(model))


def adapters_of_one_rank() -> None:
    model = pretrained()
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    if dist.get_rank() == 0:
        adapt(model)
    fit(wrapped, adamw(model))


def frozen_but_decayed() -> None:
    model = pretrained()
    optimizer = adamw(model)

    def freeze(step: int) -> None:
        model[0].requires_grad_(step < 2)

    fit(averaged(model), optimizer, before=freeze, set_to_none=False)


def merged_to_be_saved() -> None:
    model = adapt(pretrained())

    def save(step: int) -> None:
        if step == 1:
            model[0].base.weight.data += 0.5 * model[0].up.detach() @ model[0].down.detach()

    fit(DistributedDataParallel(model), adamw(model), after=save)


def checked(train: Callable[[], None]) -> CheckedFunction:
    found = check_function(train, 2, steps=STEPS)
    assert not any(end.has_failed for end in found.ends), found.ends
    return found


@pytest.mark.parametrize(
    ("train", "cause", "says"),
    [
        (added_after_the_optimizer, "added-after-the-optimizer", "0.down, 0.up"),
        (added_after_the_wrapper, "not-synchronised", "after DistributedDataParallel was created"),
        pytest.param(
            unfrozen_after_the_wrapper,
            "some-parameters-not-synchronised",
            "wrap the model again after unfreezing",
            marks=pytest.mark.nightly,
        ),
        (partial(added_after_sharding, seed=7), "not-synchronised", "0.down, 0.up are not sharded by FSDP"),
        (partial(added_after_sharding, replicated=True, seed=7), "some-parameters-not-synchronised", "Replicate"),
        pytest.param(
            partial(added_after_sharding, synchronised=True),
            "not-broadcast",
            "differ between ranks before",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            frozen_weights_of_each_rank,
            "not-broadcast",
            "4 of 4 frozen parameters differ between ranks",
            marks=pytest.mark.nightly,
        ),
        (adapters_of_one_rank, "trained-on-some-ranks", "trained on rank 0 only"),
        (frozen_but_decayed, "frozen-parameter-trained", "by weight decay or momentum"),
        (merged_to_be_saved, "merged-and-trained-on", "0.5 × the product of 0.up and 0.down was added"),
        (another_chosen_after_the_optimizer, "optimizer-holds-other-parameters", "without gradients that are frozen"),
    ],
)
def test_a_mistake_with_adapters_is_named(train: Callable[[], None], cause: str, says: str) -> None:
    bad = [one for one in checked(train).findings if one.outcome.is_bad]
    assert bad[0].cause == cause
    assert any(says in one.message for one in bad), bad


def test_adapters_that_each_rank_begins_for_itself_are_not_judged() -> None:
    """Nothing distinguishes huggingface/transformers#48873, where ranks draw different adapters, from intended ones."""
    found = checked(added_after_sharding)
    assert found.answer is Answer.NOT_JUDGED
    assert "Unless the ranks train separate adapters, this is a mistake" in found.sentence


def of_a_later_optimizer_group() -> None:
    model = pretrained()
    optimizer = adamw(model)

    def add(step: int) -> None:
        if step == 2:
            adapt(model)
            optimizer.add_param_group({"params": [model[0].down, model[0].up], "lr": 0.1})
            averaged(model[0])

    fit(averaged(model), optimizer, before=add)


def moved_with_its_adapter() -> None:
    """Like Delta-LoRA (arXiv 2309.02411): the frozen weight follows the product's change in each step."""
    model = adapt(pretrained())
    last = [torch.zeros(8, 6)]

    def follow(step: int) -> None:
        product = model[0].up.detach() @ model[0].down.detach()
        model[0].base.weight.data += 0.5 * (product - last[0])
        last[0] = product

    fit(DistributedDataParallel(model), adamw(model), after=follow)


def test_a_mask_whose_gradient_alone_is_read_is_a_note() -> None:
    class Masked(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.mask

    def train() -> None:
        model = pretrained()
        model[0].requires_grad_(False)
        optimizer = adamw(model)
        model[0].__class__ = Masked
        model[0].mask = nn.Parameter(torch.ones(8))
        fit(DistributedDataParallel(model), optimizer)

    found = checked(train)
    found.assert_right()
    (note,) = [one for one in found.findings if isinstance(one, HeadlineNote)]
    assert "but no optimizer moves it: 0.mask" in note.message


def test_frozen_weights_of_each_rank_beside_one_model_are_a_note() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(6, 4).requires_grad_(False), nn.Linear(6, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.student(inputs) + 0.1 * self.teacher(inputs)

    def train() -> None:
        torch.manual_seed(dist.get_rank())
        model = Distilled()
        for one in model.student.parameters():
            dist.broadcast(one.data, 0)
        fit(averaged(model), adamw(model))

    found = checked(train)
    found.assert_right()
    (note,) = [one for one in found.findings if isinstance(one, HeadlineNote)]
    assert "2 of 2 frozen parameters differ between ranks at the first recorded forward (teacher" in note.message


@pytest.mark.parametrize(
    ("copied", "updates", "said"),
    [
        (
            "before the broadcast",
            True,
            "Linear is called without gradients, as a teacher or a reference model is, and all",
        ),
        ("after it", False, "all 2 parameters differ between ranks since a recorded step"),
        ("after it", True, None),
    ],
)
def test_teachers_that_differ_between_ranks_are_a_note(copied: str, updates: bool, said: str | None) -> None:
    def train() -> None:
        torch.manual_seed(dist.get_rank())
        student = nn.Linear(6, 4)
        early = copy.deepcopy(student)
        model = DistributedDataParallel(student)
        teacher = early if copied == "before the broadcast" else copy.deepcopy(student)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            inputs = torch.randn(4, 6)
            with torch.no_grad():
                targets = teacher(inputs + 0.1)
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            if updates or not dist.get_rank():
                for one, other in zip(teacher.parameters(), student.parameters(), strict=True):
                    one.data.lerp_(other.data, 0.1)

    found = checked(train)
    found.assert_right(require_full=True)
    notes = [one.message for one in found.findings if isinstance(one, HeadlineNote)]
    assert [str(said) in one for one in notes] == [True] * (said is not None)


def unfrozen_on_schedule() -> None:
    model = pretrained()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    wrapped = [DistributedDataParallel(model)]

    def unfreeze(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)
            wrapped[0] = DistributedDataParallel(model)

    fit(lambda inputs: wrapped[0](inputs), optimizer, before=unfreeze)


def merged_and_begun_anew() -> None:
    """Like ReLoRA."""
    model = adapt(pretrained())

    def restart(step: int) -> None:
        if step == 1:
            model[0].base.weight.data += model[0].up.detach() @ model[0].down.detach()
            model[0].up.data.zero_()

    fit(DistributedDataParallel(model), adamw(model), after=restart)


def unloaded_in_part() -> None:
    """Like PLoRA (arXiv 2402.16141): half of the product moves to the frozen weight."""
    model = adapt(pretrained())

    def unload(step: int) -> None:
        if step == 1:
            model[0].base.weight.data += 0.5 * model[0].up.detach() @ model[0].down.detach()
            model[0].up.data *= 0.5

    fit(DistributedDataParallel(model), adamw(model), after=unload)


def averaged_after_the_backward_pass() -> None:
    """Adapters beside a sharded model have whole gradients: averaging changes them by another factor on each rank."""
    model = pretrained().requires_grad_(False)
    for one in (model[0], model[2], model):
        fully_shard(one)
    adapt(model)

    def average_all() -> None:
        for one in trainable(model):
            average(one)

    fit(model, adamw(model), after_backward=average_all)


def frozen_with_gradients_of_the_script() -> None:
    """Like the biases of a router that balance experts: the gradient is a sign, and zero if they are balanced."""
    model = pretrained()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def balance(step: int) -> None:
        model[2].bias.grad = torch.full((4,), float(step == 0))

    fit(DistributedDataParallel(model), optimizer, before=balance)


@pytest.mark.parametrize(
    "train",
    [
        of_a_later_optimizer_group,
        pytest.param(unfrozen_on_schedule, marks=pytest.mark.nightly),
        merged_and_begun_anew,
        moved_with_its_adapter,
        pytest.param(unloaded_in_part, marks=pytest.mark.nightly),
        averaged_after_the_backward_pass,
        pytest.param(frozen_with_gradients_of_the_script, marks=pytest.mark.nightly),
        partial(added_after_sharding, seed=7, replicated=True, synchronised=True),
    ],
)
def test_nothing_is_said_against_what_is_right(train: Callable[[], None]) -> None:
    checked(train).assert_right()


def test_frozen_weights_that_the_script_moves_are_a_note() -> None:
    def train() -> None:
        model = adapt(pretrained())

        def decay(step: int) -> None:
            model[0].base.weight.data *= 0.99

        fit(DistributedDataParallel(model), adamw(model), after=decay)

    found = checked(train)
    found.assert_right()
    (note,) = [one for one in found.findings if "frozen parameter" in one.message]
    assert "1 frozen parameter was multiplied by 0.99 between two optimizer steps" in note.message


def test_a_change_of_a_few_frozen_entries_is_noted_when_recording_ends() -> None:
    def train() -> None:
        model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 4))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), 0.1)

        def write(step: int) -> None:
            model[0].weight.data[0, 1] += 1

        fit(model, optimizer, after=write)

    (found,) = check_function(train, 1, steps=2).trainings
    (note,) = [one for one in found.findings if "frozen parameter" in one.message]
    assert note.message == "some entries of 1 frozen parameter changed while steps were recorded: 0.weight"
