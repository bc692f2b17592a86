"""Optimizer steps replayed in float64: right ones are within noise, changed ones are found, nothing is disturbed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from observed_steps import loss_of, recorded, recorded_on_ranks, small_model, watching
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import RecordedTraining
from plumbline.check.judge.update import judge_update
from plumbline.check.rank.optimizer.optimizer_replay import Guard, replayed
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome

OPTIONS: dict[str, dict[str, list[Any]]] = {
    "SGD": {"momentum": [0, 0.9], "weight_decay": [0, 0.1], "foreach": [None, True], "maximize": [False, True]},
    "Adam": {"amsgrad": [False, True], "fused": [None, True], "lr": [0.01, torch.tensor(0.01)]},
    "AdamW": {"amsgrad": [False, True], "foreach": [None, True], "eps": [1e-8, 1e-3], "maximize": [False, True]},
    "Adadelta": {"rho": [0.9, 0.5], "foreach": [None, True], "weight_decay": [0, 0.1]},
    "Adagrad": {"lr_decay": [0, 0.1], "initial_accumulator_value": [0, 0.5], "fused": [None, True]},
    "Adamax": {"betas": [(0.9, 0.999), (0.5, 0.9)], "foreach": [None, True]},
    "ASGD": {"lambd": [1e-4, 0.1], "t0": [1, 1e6], "foreach": [None, True]},
    "NAdam": {"decoupled_weight_decay": [False, True], "weight_decay": [0, 0.1], "foreach": [None, True]},
    "RAdam": {"weight_decay": [0, 0.1], "foreach": [None, True], "maximize": [False, True]},
    "RMSprop": {"centered": [False, True], "momentum": [0, 0.9], "foreach": [None, True]},
    "Rprop": {"etas": [(0.5, 1.2), (0.3, 1.5)], "foreach": [None, True]},
    "Adafactor": {"lr": [0.01], "eps": [(None, 1e-3), (1e-3, 1e-3)], "maximize": [False, True]},
    "Muon": {"lr": [0.01], "nesterov": [True, False], "weight_decay": [0, 0.1]},
}  # fmt: skip
"""Drawn options of torch.optim's classes."""

NAMES = [name for name in OPTIONS if hasattr(torch.optim, name)]
EXACT = [name for name in NAMES if name != "Muon"]  # it computes in bfloat16


@st.composite
def optimizers(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16), names: list[str] = NAMES
) -> Optimizer:
    name = draw(st.sampled_from(names))
    options = {key: draw(st.sampled_from(values)) for key, values in OPTIONS[name].items()}
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = draw(st.lists(st.sampled_from([(3, 4), (20, 30), (1, 5)]), min_size=1, max_size=3))
    shapes += [] if name == "Muon" else draw(st.lists(st.sampled_from([(5,), (), (130,)]), max_size=2))
    dtype = torch.float32 if options.get("fused") else draw(st.sampled_from(dtypes))
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    cut = draw(st.integers(1, len(parameters)))
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:], "lr": 0.003}]
    return getattr(torch.optim, name)([group for group in groups if group["params"]], **options)


def with_gradients(optimizer: Optimizer, without: int | None = None) -> None:
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = None if number == without else torch.randn_like(parameter)


def steps(optimizer: Optimizer, count: int = 3, change: Callable[[list[Tensor], list[Tensor]], None] | None = None):
    """Record steps; ``change`` gets the weights before and after the last step, and changes the latter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with watching() as watch, torch.no_grad():
        for index in range(count):
            with_gradients(optimizer, without=index - 1)
            watch.gradients_ready(optimizer)
            before = [p.clone() for p in parameters]
            _plain_step(optimizer)
            if change is not None and index == count - 1:
                change(before, parameters)
            watch.step_ends(optimizer)
    return RecordedTraining((watch.rank(),))


def _plain_step(optimizer: Optimizer) -> None:
    """Step without hooks, because the caller observes."""
    type(optimizer).step.__wrapped__(optimizer)


def bad(training: RecordedTraining) -> list[Finding]:
    return [finding for finding in judge_update(training) if finding.outcome.is_bad]


def causes(training: RecordedTraining) -> list[str | None]:
    return [finding.cause for finding in bad(training)]


def outcomes(training: RecordedTraining) -> set[Outcome]:
    return {finding.outcome for finding in judge_update(training)}


@given(optimizers())
def test_right_steps_of_every_class_are_within_noise(optimizer):
    findings = list(judge_update(steps(optimizer)))
    assert {finding.outcome for finding in findings} == {Outcome.PASSED}
    assert all((finding.error_x_noise or 0) <= (finding.limit_x_noise or 0) / 2 for finding in findings)


def test_a_step_that_overflows_in_its_own_precision_is_told_from_a_wrong_one():
    weights = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.RMSprop([weights], momentum=0.9)  # its eps is 0 in float16
    with watching() as watch, torch.no_grad():
        weights.grad = torch.tensor([1.0, 1e-4, 1.0], dtype=torch.float16)  # and the square of 1e-4 is 0 too
        watch.gradients_ready(optimizer)
        _plain_step(optimizer)
        watch.step_ends(optimizer)
    assert causes(RecordedTraining((watch.rank(),))) == ["update-not-finite"]


@given(optimizers(dtypes=(torch.float64,), names=EXACT))
def test_the_replay_is_what_the_same_optimizer_does_in_float64(optimizer):
    if any(group.get("fused") for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])  # a tensor would have its own precision
    for _ in range(2):
        with_gradients(optimizer)
        optimizer.step()
    with_gradients(optimizer)
    predicted = [
        (p, *replayed(optimizer, group, [p], Guard(optimizer)))
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    optimizer.step()
    for parameter, after in predicted:
        torch.testing.assert_close(after.exact, parameter.detach(), rtol=1e-9, atol=1e-9)  # some states are float32
        torch.testing.assert_close(after.native, parameter.detach(), rtol=1e-14, atol=1e-14)


def _doubled(before: list[Tensor], after: list[Tensor]) -> None:
    for old, new in zip(before, after, strict=True):
        new += new - old


def _undone(before: list[Tensor], after: list[Tensor]) -> None:
    for old, new in zip(before, after, strict=True):
        new.copy_(old)


def _disturbed(before: list[Tensor], after: list[Tensor]) -> None:
    after[0] += torch.randn_like(after[0]) * 0.1


def _rounded(before: list[Tensor], after: list[Tensor]) -> None:
    for new in after:
        new.copy_(new.bfloat16())


# Muon orthogonalises in bfloat16: its noise is as large as its update.
@given(
    optimizers(dtypes=(torch.float32,), names=EXACT),
    st.sampled_from([_doubled, _undone, _disturbed, _rounded]),
)
def test_a_changed_update_is_found_and_named(optimizer, change):
    expected = {
        _doubled: "scaled-update", _undone: "no-update", _disturbed: "another-optimizer",
        _rounded: "stored-in-lower-precision",
    }  # fmt: skip
    assert causes(steps(optimizer, change=change)) == [expected[change]]


@pytest.mark.parametrize(("change", "expected"), [(None, []), (_doubled, ["scaled-update"])], ids=["right", "doubled"])
def test_weights_that_were_never_initialised_do_not_count(change, expected):
    padded = nn.Parameter(torch.randn(100))
    padded.data[-3:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert causes(steps(torch.optim.AdamW([padded]), change=change)) == expected


def test_the_factor_of_an_update_is_said():
    (finding,) = bad(steps(torch.optim.Adam([nn.Parameter(torch.randn(9, 9))]), change=_doubled))
    assert "the update is 2 × the right one" in finding.message
    assert (finding.step, finding.rank, finding.parameter) == (2, 0, "p0")


def _train(optimizer_of: Callable[[Any], Optimizer], count: int = 4) -> list[float]:
    model = small_model()
    optimizer = optimizer_of(model.parameters())
    losses = []
    for index in range(count):
        loss = nn.functional.dropout(loss_of(model, index), 0.1) + torch.rand(())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class PlainSign(Optimizer):
    """A user-defined optimizer class."""

    def __init__(self, params: Any, lr: float = 0.01, noisy: bool = False) -> None:
        self.noisy = noisy
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1
                p.add_(p.grad.sign() + (torch.randn_like(p) if self.noisy else 0), alpha=-group["lr"])


class KeepsFirst(PlainSign):
    """An optimizer that keeps tensors of its own, which a copy would share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.first = [p.detach().clone() for p in self.param_groups[0]["params"]]


class Slow(PlainSign):
    """An optimizer that averages with weights that only its closure refers to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        everything = self.param_groups[0]["params"]
        self.state[everything[0]]["all"] = 0
        Slow.everything = everything

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in Slow.everything:
            p.mul_(0.5)


class Buffer:
    def __init__(self, like: Tensor) -> None:
        self.values = torch.zeros_like(like)


class Remembers(PlainSign):
    """An optimizer whose state is an object, and whose steps shrink by a list in a dict that a copy might share."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: dict[str, list[float]] = {"norms": []}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", Buffer(p)).values.lerp_(p.grad, 0.1)
                self.seen["norms"].append(float(p.grad.norm()))
                p.add_(buffer, alpha=-1 / len(self.seen["norms"]))


class Draws(PlainSign):
    """An optimizer that skips parameters at random, by Python's generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-float(random.random() < 0.5))


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), PlainSign, lambda p: PlainSign(p, noisy=True),
     KeepsFirst, Slow, Remembers, Draws, lambda p: torch.optim.Adam(p, fused=True)],
)  # fmt: skip
def test_losses_are_the_same_bit_for_bit_whether_steps_are_replayed_or_not(make):
    torch.manual_seed(3)
    random.seed(3)
    plain = _train(make)
    torch.manual_seed(3)
    random.seed(3)
    with watching():
        assert _train(make) == plain


class Coupled(PlainSign):
    """An optimizer whose updates depend on all gradients, all states, and a state that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.shrink = lambda norm: 1 / (1 + norm)
        self.param_groups[0]["total"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        held = [p for p in group["params"] if p.grad is not None]
        for p in held:
            self.state[p].setdefault("first", p.clone())
        group["total"].add_(sum((p - self.state[p]["first"]).norm() for p in held))
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        rate = self.shrink(sum(p.grad.norm() for p in held)) * (1 + group["total"]) / self.state["all"]["steps"]
        for p in held:
            p.sub_(p.grad * rate)


class Counts(PlainSign):
    """An optimizer whose steps shrink by a counter that a copy shares."""

    count: ClassVar = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        Counts.count[0] += 1
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-1 / Counts.count[0])


@pytest.mark.parametrize("make", [PlainSign, lambda p: PlainSign(p, noisy=True), Coupled, Draws])
def test_a_class_that_torch_does_not_have_is_judged_where_a_copy_repeats_its_step(make):
    assert outcomes(recorded(lambda: _train(make))) == {Outcome.PASSED}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Counts, "gives a different result for the same step"),
        (KeepsFirst, "cannot be copied, so the step cannot be recomputed"),
        (Slow, "uses tensors other than the parameter's own"),
    ],
)
def test_other_classes_are_not_judged(make, why):
    findings = list(judge_update(recorded(lambda: _train(make))))
    assert not [finding for finding in findings if finding.outcome.is_bad]
    assert any(why in finding.message for finding in findings), findings


def test_lbfgs_is_not_judged():
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    (finding,) = judge_update(recorded(lambda: optimizer.step(closure)))
    assert finding.outcome is Outcome.SKIPPED
    assert "LBFGS evaluates the loss several times" in finding.message


def test_a_hook_of_the_script_within_the_step_is_not_taken_for_a_mistake():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()])
        for index in range(2):
            loss_of(model, index).backward()
            optimizer.step()

    findings = list(judge_update(recorded(script)))
    assert Outcome.FAILED not in {finding.outcome for finding in findings}
    assert any("hooks of the script" in finding.message for finding in findings)


def test_weight_clipping_between_steps_is_information():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.RMSprop(model.parameters())
        for index in range(3):
            loss_of(model, index).backward()
            optimizer.step()
            for p in model.parameters():
                p.data.clamp_(-0.05, 0.05)

    findings = list(judge_update(recorded(script)))
    assert {finding.outcome for finding in findings} == {Outcome.PASSED}
    assert any("changed between optimizer steps" in finding.message for finding in findings)


def _sam() -> None:
    """Sharpness-aware minimisation: move the weights, compute another gradient, move back, and step."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for index in range(3):
        loss_of(model, index).backward()
        with torch.no_grad():
            moves = [0.01 * p.grad for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p += move
        optimizer.zero_grad()
        loss_of(model, index).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p -= move
        optimizer.step()
        optimizer.zero_grad()


def _averaged_copy() -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    for index in range(3):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()
        average.update_parameters(model)


def _some_without_gradient() -> None:
    model = small_model(6, 9, 9, 4)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for index in range(3):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        if index == 1:
            model[4].weight.grad = None
        optimizer.step()


def _one_optimizer_a_parameter() -> None:
    model = small_model()
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for index in range(3):
        loss_of(model, index).backward()


def _sparse() -> None:
    table = nn.Embedding(20, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for index in range(3):
        optimizer.zero_grad()
        table(torch.tensor([index, 1, 1])).square().sum().backward()
        optimizer.step()


def _no_gradient_at_all() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    loss_of(model).backward()
    optimizer.step()


def _warm_up_from_zero() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    for index in range(3):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()
        schedule.step()


def _tied_by_two_names() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index in range(2):
        optimizer.zero_grad()
        loss_of(model, index).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "script",
    [_sam, _averaged_copy, _some_without_gradient, _one_optimizer_a_parameter, _sparse, _no_gradient_at_all,
     _warm_up_from_zero, _tied_by_two_names],
)  # fmt: skip
def test_nothing_is_found_wrong_with(script):
    findings = list(judge_update(recorded(script)))
    assert not [finding for finding in findings if finding.outcome.is_bad]
    assert any(finding.error_x_noise is not None for finding in findings)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam"])
def test_a_compiled_step_rounds_more_and_is_right(name):
    """Compiled code has 1 - β₂ in float32, which shows if weights are too small to hide rounding."""

    def script() -> None:
        model = small_model()
        for p in model.parameters():
            p.data.mul_(1e-6)
        optimizer = getattr(torch.optim, name)(model.parameters())
        step = torch.compile(optimizer.step, backend="aot_eager")
        for index in range(2):
            optimizer.zero_grad()
            (loss_of(model, index) + sum(p.sum() for p in model.parameters())).backward()
            step()

    torch._dynamo.reset()
    training = recorded(script)
    assert len(training.ranks[0].steps) == 2
    assert outcomes(training) == {Outcome.PASSED}


def test_weights_that_are_no_numbers_to_train_are_left_alone():
    """Like those of quantised layers, which optimizers get with all others."""

    def script() -> None:
        model = small_model()
        frozen = [nn.Parameter(torch.ones(9, dtype=dtype), requires_grad=False) for dtype in (torch.uint8, torch.bool)]
        optimizer = torch.optim.AdamW([*frozen, *model.parameters()])
        for index in range(2):
            optimizer.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()

    assert outcomes(recorded(script)) == {Outcome.PASSED}


def test_a_learning_rate_of_zero_is_no_evidence():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        loss_of(model).backward()
        optimizer.step()

    (finding,) = judge_update(recorded(script))
    assert finding.outcome is Outcome.SKIPPED
    assert "learning rate is 0" in finding.message


def test_two_steps_with_one_gradient_are_found():
    def script() -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for index in range(2):
            optimizer.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.step()

    (finding,) = bad(recorded(script))
    assert (finding.check, finding.cause, finding.step) == ("steps", "stepped-without-a-batch", 1)


def test_ranks_that_share_their_weights_are_found():
    model = small_model()
    model.share_memory()
    own = copy.deepcopy(model)

    def script(chosen: nn.Module) -> Callable[[int], None]:
        def on_rank(rank: int) -> None:
            optimizer = torch.optim.SGD(chosen.parameters(), 0.1)
            for index in range(2):
                optimizer.zero_grad()
                loss_of(chosen, 2 * index + rank).backward()
                for p in chosen.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= 2
                optimizer.step()
                dist.barrier()

        return on_rank

    assert causes(recorded_on_ranks(script(model))) == ["applied-once-a-rank"]
    assert causes(recorded_on_ranks(script(own))) == []


def test_zero_redundancy_is_judged_by_the_share_of_each_rank():
    def script(rank: int) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = small_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for index in range(3):
            optimizer.zero_grad()
            loss_of(model, index).backward()
            optimizer.step()
            schedule.step()

    training = recorded_on_ranks(script)
    assert outcomes(training) == {Outcome.PASSED}
    judged = [{row[0] for row in rank.steps[-1].facts["update"]["parameters"]} for rank in training.ranks]
    assert set.union(*judged) == {0, 1, 2, 3}
    assert not set.intersection(*judged)
