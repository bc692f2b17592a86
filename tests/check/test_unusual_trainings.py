"""Unusual right trainings on real ranks are not accused, and a mistake in them is named."""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from plumbline.check.verdict.verdict import Answer, answer_of

STEPS = 3


def assert_judged(checked, wrong):
    """``wrong``: a pattern of what the verdict says; "" if the training is right."""
    if not wrong:
        checked.assert_right(require_full=True)
        return
    with pytest.raises(AssertionError, match=wrong):
        checked.assert_right()


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch():
    return torch.randn(4, 6), torch.randint(3, (4,))


def loss_of(model, *, synchronised=True):
    inputs, targets = batch()
    return cross_entropy((model if synchronised else model.module)(inputs), targets)


def train_steps(model, optimizer=None, *, loss=loss_of, change=lambda model: None):
    """Take steps with the rank's own samples, and change gradients before each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        change(model)
        optimizer.step()


def two_optimizers_after_one_pass(synchronised=True):
    model = DistributedDataParallel(small())
    matrices = torch.optim.SGD([one for one in model.parameters() if one.dim() == 2], 0.1)
    vectors = torch.optim.AdamW([one for one in model.parameters() if one.dim() == 1], 0.01)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(model, synchronised=synchronised).backward()
        matrices.step()
        vectors.step()


def an_optimizer_for_each_parameter(synchronised=True):
    model = small()

    def step(parameter):
        if synchronised:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss_of(model).backward()


class Spectral(nn.Module):
    """Complex weights, as in a Fourier neural operator."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, inputs):
        return (torch.fft.rfft(self.before(inputs)) @ self.weight).abs()


def complex_weights(synchronised=True):
    torch.manual_seed(0)
    model = DistributedDataParallel(Spectral())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train_steps(model, optimizer, loss=partial(loss_of, synchronised=synchronised))


def a_layer_frozen_by_removing_its_gradients(synchronised=True):
    """Like DINO's last layer in the first epoch."""
    model = DistributedDataParallel(small())

    def remove(model):
        for parameter in model.module[2].parameters():
            parameter.grad = None

    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    train_steps(model, optimizer, loss=partial(loss_of, synchronised=synchronised), change=remove)


class RaisesOnce(torch.optim.SGD):
    """An optimizer whose second step fails."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise ValueError("not this time")
        return super().step(closure)


def a_step_that_raised(synchronised=True):
    model = DistributedDataParallel(small())
    optimizer = RaisesOnce(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS + 1):
        optimizer.zero_grad()
        loss_of(model, synchronised=synchronised).backward()
        with contextlib.suppress(ValueError):
            optimizer.step()


ALL = [
    two_optimizers_after_one_pass,
    an_optimizer_for_each_parameter,
    complex_weights,
    a_layer_frozen_by_removing_its_gradients,
    a_step_that_raised,
]


@pytest.mark.parametrize("train", ALL, ids=lambda train: train.__name__)
def test_it_is_right_and_wholly_compared(plumbline, train):
    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right()
    (training,) = checked.trainings
    coverage = training.coverage
    frozen = a_layer_frozen_by_removing_its_gradients
    assert (coverage.gradients.part, coverage.updates.part) == (1, 1) or train is frozen
    assert not coverage.replays.left_out or train is an_optimizer_for_each_parameter  # steps inside the backward pass


@pytest.mark.parametrize("train", ALL, ids=lambda train: train.__name__)
def test_gradients_that_are_never_synchronised_are_named(plumbline, train):
    checked = plumbline.check(lambda: train(synchronised=False), ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="wrong: gradients: not synchronised"):
        checked.assert_right()


class ShortOfMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.fails = small(), []

    def forward(self, inputs):
        inputs.requires_grad_().register_hook(self.fail)
        return self.inner(inputs)

    def fail(self, gradient):
        if self.fails and self.fails.pop():
            raise RuntimeError("out of memory")


def test_a_backward_pass_that_fails_and_is_done_again_is_right(plumbline):
    def train():
        model = ShortOfMemory()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(STEPS):
            model.fails = [False, number == 1]
            for _ in range(1 + (number == 1)):
                optimizer.zero_grad()
                with contextlib.suppress(RuntimeError):
                    loss_of(model).backward()
            optimizer.step()

    plumbline.check(train, ranks=1, steps=STEPS).assert_right()


def test_removed_gradients_are_told(plumbline):
    checked = plumbline.check(a_layer_frozen_by_removing_its_gradients, ranks=2, steps=STEPS)
    assert any("sets those of 2.bias, 2.weight to None" in one.message for one in checked.findings)


def skips_its_first_step(zeroes, scale):
    """The first loss is infinite on one rank; unless it ``zeroes``, a skipped step keeps the gradients."""
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    torch.manual_seed(dist.get_rank())
    for number in range(STEPS):
        scaler.scale(loss_of(model) * (math.inf if number == 0 and dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if zeroes or scaler.get_scale() >= before:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("zeroes", "scale", "found"),
    [(True, 16.0, []), (False, 16.0, ["skipped-without-overflow"]), (False, 2.0**40, [])],
)
def test_infinities_that_a_skipped_step_leaves_are_found(plumbline, zeroes, scale, found):
    """If float16 could not hold the sum over ranks either, they may be new ones."""
    checked = plumbline.check(lambda: skips_its_first_step(zeroes, scale), ranks=2, steps=STEPS)
    assert [(one.cause, one.step) for one in checked.findings if one.outcome.is_bad] == [(one, 1) for one in found]


class OnQuantizedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = small()
        self.quantized = nn.Parameter(torch.randint(9, (6, 6), dtype=torch.uint8), requires_grad=False)

    def forward(self, inputs):
        return self.head(inputs @ self.quantized.float())


def test_an_optimizer_may_hold_weights_that_are_no_floating_point_numbers(plumbline):
    def train():
        model = OnQuantizedWeights()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for number in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * (math.inf if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    checked = plumbline.check(train, ranks=1, steps=STEPS)
    assert [one.message for one in checked.findings if one.check == "skipped-steps"] == [
        f"the loss scaler skipped 1 of {STEPS} steps"
    ]


def trainings_of_their_own():
    """As in a search over settings."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / (1 + dist.get_rank()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def stages_of_a_pipeline():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            hidden = model(torch.randn(4, 6))
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            received = torch.empty(4, 6)
            dist.recv(received, 0)
            model(received.requires_grad_()).square().mean().backward()
            dist.send(received.grad, 0)
        optimizer.step()


def test_stages_of_a_pipeline_are_right(plumbline):
    plumbline.check(stages_of_a_pipeline, ranks=2, steps=STEPS).assert_right()


def test_ranks_that_do_not_train_one_model_are_not_accused(plumbline):
    checked = plumbline.check(trainings_of_their_own, ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="not judged: each rank holds its own weights"):
        checked.assert_right()


def gradients_set_to_zero():
    train_steps(DistributedDataParallel(small()), change=lambda model: model.module[2].weight.grad.zero_())


def gradients_from_elsewhere():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())

    def loss(weights, inputs, targets):
        return cross_entropy(torch.func.functional_call(model, weights, (inputs,)), targets)

    for _ in range(STEPS):
        gradients = torch.func.grad(loss)(dict(model.named_parameters()), *batch())
        for name, parameter in model.named_parameters():
            dist.all_reduce(gradients[name])
            parameter.grad = gradients[name] / dist.get_world_size()
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (gradients_set_to_zero, "the script sets the gradients of some parameters to zero"),
        (gradients_from_elsewhere, "computes them with torch.func"),
    ],
)
def test_what_cannot_be_judged_is_said_with_its_reason(plumbline, train, why):
    checked = plumbline.check(train, ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match=f"not judged: (?!not judged).*{why}"):
        checked.assert_right()


def test_compiled_autograd_compiles_no_hook_of_the_recorder(plumbline):
    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(model)
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                loss.backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=1, steps=2)
    assert not any(end.has_failed for end in checked.ends)
    assert any("or compiled autograd" in one.message for one in checked.findings)


def test_what_ended_recording_is_said(plumbline, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plumbline.check.rank.evidence_writer.write_file", fails)
    with pytest.raises(AssertionError, match=r"nothing was recorded: .*No space left on device.*TMPDIR"):
        plumbline.check(two_optimizers_after_one_pass, ranks=1).assert_right()


def each_rank_alone():
    train_steps(small())


def around_its_wrapper():
    train_steps(DistributedDataParallel(small()), loss=partial(loss_of, synchronised=False))


@pytest.mark.parametrize(
    ("train", "says", "says_not"),
    [
        (each_rank_alone, "wrap the model in DistributedDataParallel", "call the DistributedDataParallel object"),
        (around_its_wrapper, "call the DistributedDataParallel object", "wrap the model"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_advice_about_gradients_fits_the_script(plumbline, train, says, says_not):
    checked = plumbline.check(train, ranks=2, steps=STEPS)
    (finding,) = [one for one in checked.findings if one.check == "gradients"]
    assert says in finding.message
    assert says_not not in finding.message


def test_frozen_parameters_are_not_counted_as_trainable(plumbline):
    def train():
        model = small()
        model[0].requires_grad_(False)
        train_steps(model)

    checked = plumbline.check(train, ranks=1, steps=STEPS)
    checked.assert_right()
    (training,) = checked.trainings
    assert training.coverage.entries == 8 * 3 + 3


class Alone(torch.autograd.Function):
    """Sums over a group with one rank, like a divided layer with a single part."""

    @staticmethod
    def forward(context, values, group):
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class InOnePart(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()
        self.group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def forward(self, inputs):
        return Alone.apply(self.body(inputs), self.group)


class Wrapper(nn.Module):
    """A wrapper whose buffers hold gradients for the reduction, like Megatron's."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.buffers = [torch.zeros(2)]

    def forward(self, inputs):
        return self.module(inputs)


def test_a_collective_in_a_group_of_one_rank_is_computed_again_by_each_rank(plumbline):
    def train():
        torch.manual_seed(0)
        model = Wrapper(InOnePart())
        sizes = [one.numel() for one in model.parameters()]
        shards = [one.detach().view(-1).chunk(2)[dist.get_rank()] for one in model.parameters()]
        optimizer = torch.optim.AdamW(shards, 0.01)  # like a distributed optimizer: each rank updates its part
        torch.manual_seed(10 + dist.get_rank())
        for _ in range(STEPS):
            model.zero_grad()
            loss_of(model).backward()
            for one, shard in zip(model.parameters(), shards, strict=True):
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()
                shard.grad = one.grad.view(-1).chunk(2)[dist.get_rank()].clone()
            optimizer.step()
            for one, size in zip(model.parameters(), sizes, strict=True):
                flat = one.detach().view(-1)
                first, second = flat.split([-(-size // 2), size // 2])
                dist.broadcast(first, 0)
                dist.broadcast(second, 1)

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right(require_full=True)
    (training,) = checked.trainings
    assert training.coverage.replays.part == 1
    assert not training.coverage.is_joint


def lost(model):
    model[0].weight.grad.zero_()


def noisy(model):
    for one in model.parameters():
        one.grad += 0.01 * torch.randn(one.grad.shape)


def trained_after(change, *, wrap=lambda model: model):
    """Return a training whose ranks have their own samples, and that changes gradients before each step."""
    return lambda: train_steps(wrap(small()), change=change)


@pytest.mark.parametrize("edit", [lost, noisy])
def test_gradients_that_change_after_they_were_clipped_are_not_judged(plumbline, edit):
    def clip_and_edit(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        edit(model)

    checked = plumbline.check(trained_after(clip_and_edit), ranks=1, steps=STEPS)
    with pytest.raises(AssertionError, match="not judged: the script changes gradients after it clips them"):
        checked.assert_right()


def centralised(model):
    for one in model.parameters():
        one.grad -= one.grad.mean()


def with_noise_of_its_own_on_each_rank(model):
    noise = torch.Generator().manual_seed(dist.get_rank())
    for one in model.parameters():
        one.grad += 0.1 * torch.randn(one.grad.shape, generator=noise)


def multiplied_by_a_number_of_each_rank(model):
    for one in model.parameters():
        one.grad *= 1 - 0.1 * dist.get_rank()


def test_gradients_that_were_right_before_the_script_changed_them_are_told(plumbline):
    checked = plumbline.check(trained_after(centralised, wrap=DistributedDataParallel), ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match=r"not judged: .* the gradients are right \(compared from step 1 on\)"):
        checked.assert_right()


def doubled_on_one_rank(model):
    if dist.get_rank() == 1:
        for one in model.parameters():
            one.grad *= 2


@pytest.mark.parametrize(
    "edit", [with_noise_of_its_own_on_each_rank, multiplied_by_a_number_of_each_rank, doubled_on_one_rank]
)
def test_a_change_of_reduced_gradients_that_differs_between_ranks_is_found(plumbline, edit):
    checked = plumbline.check(trained_after(edit, wrap=DistributedDataParallel), ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="wrong: gradients: changed differently on ranks"):
        checked.assert_right()


def test_a_sum_that_only_one_rank_divides_is_found(plumbline):
    def reduced(model):
        for one in model.parameters():
            dist.all_reduce(one.grad)
            if dist.get_rank() == 0:
                one.grad /= dist.get_world_size()

    checked = plumbline.check(trained_after(reduced), ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="wrong: gradients: summed over ranks"):
        checked.assert_right()


def weighted_by_samples(divide):
    """Batches of unequal size; ``divide`` makes the divisor from the rank's own number of samples and that of all."""

    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for step in range(STEPS):
            own = 3 + (step + dist.get_rank()) % 3
            every = torch.tensor(float(own))
            dist.all_reduce(every)
            optimizer.zero_grad()
            cross_entropy(model(torch.randn(own, 6)), torch.randint(3, (own,))).backward()
            for one in model.parameters():
                one.grad *= own
                dist.all_reduce(one.grad)
                one.grad /= divide(own, float(every))
            optimizer.step()

    return train


@pytest.mark.parametrize(
    ("divide", "said"),
    [
        (lambda own, every: every, "weights the gradient of each rank by the terms of its loss"),
        (lambda own, every: 2 * every, "add up to 0.5 instead of 1"),
        (lambda own, every: own, "although the script reduces the gradients over all ranks"),
    ],
    ids=["right", "halved", "by the own number"],
)
def test_gradients_that_are_weighted_by_numbers_of_samples_are_judged(plumbline, divide, said):
    checked = plumbline.check(weighted_by_samples(divide), ranks=2, steps=STEPS)
    gradients, objective = (
        " ".join(one.message for one in checked.findings if one.check == check) for check in ("gradients", "objective")
    )
    assert said in gradients
    if "weights the gradient" in said:
        checked.assert_right(require_full=True)
        assert "those of the mean over all 7 to 9 terms of cross_entropy" in objective
    if "although" in said:
        with pytest.raises(AssertionError, match="wrong: gradients: changed differently on ranks"):
            checked.assert_right()


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, inputs):
        return self.heads[dist.get_rank()](self.trunk(inputs).tanh())


@pytest.mark.parametrize("skips", [True, False])
def test_gradients_of_different_parameters_that_are_averaged_with_each_other_are_found(plumbline, skips):
    def reduced(model):
        for one in model.parameters():
            if one.grad is None and not skips:
                one.grad = torch.zeros_like(one)
            if one.grad is not None:
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()

    def train():
        train_steps(TwoTasks(), change=reduced)

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert_judged(checked, "wrong: gradients: reduced with another parameter" if skips else "")


@pytest.mark.parametrize("reduces", [True, False])
def test_short_windows_that_are_not_reduced_are_named(plumbline, reduces):
    def train():
        model = fully_shard(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for window in (2, 1, 2):
            for micro in range(window):
                model.set_requires_gradient_sync(micro == (window if reduces else 2) - 1)
                (loss_of(model) / window).backward()
            optimizer.step()
            optimizer.zero_grad()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert_judged(checked, "" if reduces else "wrong: gradients: reduction switched off")


class Stream(IterableDataset):
    def __init__(self, *, is_divided):
        self.is_divided = is_divided

    def __iter__(self):
        torch.manual_seed(0)
        samples = [(torch.randn(6), torch.tensor(number % 3)) for number in range(24)]
        worker = get_worker_info()
        yield from samples[worker.id :: worker.num_workers] if self.is_divided else samples


@pytest.mark.parametrize("is_divided", [True, False])
def test_workers_that_all_read_the_same_samples_are_found(plumbline, is_divided):
    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for inputs, targets in DataLoader(Stream(is_divided=is_divided), batch_size=3, num_workers=2):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=1, steps=4)
    assert_judged(checked, "" if is_divided else "wrong: samples: workers alike")


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_that_one_rank_skips_is_named(plumbline, alone):
    def train():
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            if step != 1 or (alone and dist.get_rank() == 0):
                optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert_judged(checked, "wrong: gradients: skipped on some ranks" if alone else "")


class Adapted(nn.Module):
    """A frozen layer with an adapter in a reentrant checkpoint, and a trained head."""

    def __init__(self, *, requires_input):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)
        self.block.adapter = nn.Linear(6, 6)
        self.requires_input = requires_input

    def forward(self, inputs):
        if self.requires_input:
            inputs.requires_grad_()
        return self.head(
            checkpoint(lambda rows: self.block(rows) + self.block.adapter(rows), inputs, use_reentrant=True)
        )


@pytest.mark.parametrize("requires_input", [True, False])
def test_adapters_that_a_checkpoint_cuts_off_are_found(plumbline, requires_input):
    def train():
        model = Adapted(requires_input=requires_input)
        train_steps(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1))

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    bad = [one for one in checked.findings if one.outcome.is_bad and one.check == "recomputation"]
    assert [one.cause for one in bad] == ["cut-off-by-a-checkpoint"] * (not requires_input)
    assert all(one.message.startswith("2 parameters in reentrant activation checkpoints") for one in bad)


@pytest.mark.parametrize("zeroes", [False, True])
def test_other_weights_that_are_evaluated_within_a_window_are_no_change(plumbline, zeroes):
    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            (loss_of(model) / 2).backward()
            with torch.no_grad():
                kept = [one.clone() for one in model.parameters()]
                for one in model.parameters():
                    one.mul_(0.9)
                loss_of(model)
                for one, value in zip(model.parameters(), kept, strict=True):
                    one.copy_(value)
            if zeroes:
                optimizer.zero_grad()
            (loss_of(model) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=STEPS)
    assert not any("weights change" in one.message for one in checked.findings)
    assert_judged(checked, "wrong: gradients: only last micro batch" if zeroes else "")


def test_a_gradient_that_the_script_puts_back_keeps_the_name_of_what_it_is(plumbline):
    def train():
        model = DistributedDataParallel(small())
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model)
            (own,) = torch.autograd.grad(loss, model.module[0].weight, retain_graph=True)
            loss.backward()
            model.module[0].weight.grad = own
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="wrong: gradients: some parameters not synchronised"):
        checked.assert_right()


def rounded_on_the_way(divisor):
    """Return a communication hook that sums gradients in float16."""

    def compress(state, bucket):
        small = (bucket.buffer() / divisor).half()
        future = dist.all_reduce(small, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    return compress


@pytest.mark.parametrize("divisor", [2, 1], ids=["mean", "sum"])
def test_a_hook_of_the_scripts_own_may_round_to_16_bits(plumbline, divisor):
    def train():
        model = DistributedDataParallel(small())
        model.register_comm_hook(None, rounded_on_the_way(divisor))
        train_steps(model)

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert_judged(checked, "" if divisor == 2 else "wrong: gradients: summed over ranks")


def averaged(model):
    for one in model.parameters():
        dist.all_reduce(one.grad)
        one.grad /= dist.get_world_size()


def summed(model):
    for one in model.parameters():
        dist.all_reduce(one.grad)


@pytest.mark.parametrize("divisor", [2, 4], ids=["mean", "averaged twice"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_script_may_reduce_gradients_in_16_bits(plumbline, dtype, divisor):
    def reduce(model):
        for one in model.parameters():
            small = one.grad.to(dtype)
            dist.all_reduce(small)
            one.grad.copy_(small.float() / divisor)

    checked = plumbline.check(trained_after(reduce), ranks=2, steps=STEPS)
    assert_judged(checked, "" if divisor == 2 else "wrong: gradients: averaged twice")


def reduced_in_hooks(divisor, *, in_place=False):
    """Return a model whose hooks reduce each gradient over ranks, and divide it."""

    def reduce(gradient):
        total = gradient if in_place else gradient.clone()
        dist.all_reduce(total)
        return total.div_(divisor)

    model = small()
    for one in model.parameters():
        one.register_hook(reduce)
    return model


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("divisor", "wrong"), [(2, ""), (1, "summed over ranks"), (4, "averaged twice")])
def test_hooks_on_parameters_may_reduce_gradients(plumbline, divisor, wrong, in_place):
    checked = plumbline.check(lambda: train_steps(reduced_in_hooks(divisor, in_place=in_place)), ranks=2, steps=STEPS)
    assert_judged(checked, wrong and f"wrong: gradients: {wrong}")


def test_a_metric_that_is_reduced_in_16_bits_hides_no_rounding_of_gradients(plumbline):
    def reduce(model):
        averaged(model)
        for one in model.parameters():
            one.grad.copy_(one.grad.bfloat16())
        dist.all_reduce(torch.zeros(8, dtype=torch.bfloat16))

    checked = plumbline.check(trained_after(reduce), ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="the script changes gradients with its own code"):
        checked.assert_right()


def reduced_to_the_first_rank(model):
    for one in model.parameters():
        dist.reduce(one.grad, 0)
        one.grad /= dist.get_world_size()


def test_gradients_that_only_some_ranks_receive_are_found(plumbline):
    checked = plumbline.check(trained_after(reduced_to_the_first_rank), ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="wrong: gradients: reduced to some ranks only"):
        checked.assert_right()


@pytest.mark.parametrize("limit", [math.inf, 100.0], ids=["only measured", "not reached"])
def test_gradients_that_are_averaged_after_a_call_that_clips_nothing_are_right(plumbline, limit):
    def measure_and_average(model):
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        averaged(model)

    plumbline.check(trained_after(measure_and_average), ranks=2, steps=STEPS).assert_right(require_full=True)


@pytest.mark.parametrize("limit", [100.0, 0.01], ids=["not reached", "reached"])
def test_a_factor_after_clipping_is_found(plumbline, limit):
    def divide_after_clipping(model):
        averaged(model)
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        for one in model.parameters():
            one.grad /= dist.get_world_size()

    checked = plumbline.check(trained_after(divide_after_clipping), ranks=2, steps=STEPS)
    (wrong,) = [one for one in checked.findings if one.outcome.is_bad]
    assert (wrong.check, wrong.cause) == ("gradients", "averaged-twice")


@pytest.mark.parametrize("divisor", [1.0, 2.0])
def test_the_loss_of_another_model_does_not_explain_a_factor(plumbline, divisor):
    def train():
        models = [DistributedDataParallel(small()) for _ in range(2)]
        torch.manual_seed(dist.get_rank())
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for _ in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model).backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                for one in model.parameters():
                    one.grad /= divisor
                optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert [one.check for one in checked.findings if one.outcome.is_bad] == ["gradients"] * (divisor == 2)


@pytest.mark.parametrize("counted", ["all ranks", "ranks with tokens"])
def test_a_factor_fits_also_the_steps_in_which_a_mask_leaves_a_rank_no_term(plumbline, counted):
    def train():
        model = DistributedDataParallel(small())
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(STEPS):
            optimizer.zero_grad()
            kept = 0 if dist.get_rank() and number == 1 else 2
            losses = -model(batch()[0]).log_softmax(1)[:, 0]
            (losses * (torch.arange(len(losses)) < kept)).sum().backward()
            tokens = 2 if number == 1 else 4
            for one in model.parameters():
                one.grad *= (2 if counted == "all ranks" or number != 1 else 1) / tokens
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert_judged(checked, "" if counted == "all ranks" else "it is not known whether its loss requires that")


@pytest.mark.parametrize(
    ("loss", "answer"),
    [
        (lambda losses, mask: losses.mean(), Answer.WRONG),
        (lambda losses, mask: losses.mean() + losses.square().mean(), Answer.NOT_JUDGED),  # perhaps their mean
        (lambda losses, mask: (losses * mask).sum(), Answer.RIGHT),
    ],
)
def test_a_factor_fits_a_sum_that_is_written_by_hand_but_no_mean(plumbline, loss, answer):
    def train():
        mask = torch.tensor([1.0, 1, 1, 0]) if dist.get_rank() else torch.tensor([1.0, 0, 0, 0])

        def halve(model):
            for one in model.parameters():
                one.grad /= 2  # the ranks; also the number of all tokens, divided by that of the ranks

        def masked(model):
            return loss(-model(batch()[0]).log_softmax(1)[:, 0], mask)

        train_steps(DistributedDataParallel(small()), loss=masked, change=halve)

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert answer_of(checked.trainings[0]) is answer
    wrong = [one.cause for one in checked.findings if one.outcome.is_bad]
    assert wrong == ["averaged-twice"] * (answer is Answer.WRONG)


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    ],
    ids=["norm", "value"],
)
@pytest.mark.parametrize("first", ["clip", "average"])
def test_each_rank_clipping_by_itself_is_found(plumbline, clip, first):
    def change(model):
        for step in (clip, averaged) if first == "clip" else (averaged, clip):
            step(model)

    checked = plumbline.check(trained_after(change), ranks=2, steps=STEPS)
    root = next((one for one in checked.findings if one.outcome.is_bad and not one.consequence_of), None)
    assert (root and root.cause) == ("clipped-before-averaging" if first == "clip" else None)


def clip_by_hand(model):
    norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
    for one in model.parameters():
        one.grad *= min(1.0, 0.01 / norm.item())


@pytest.mark.parametrize(
    ("clip", "cause"),
    [
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), "clipped-to-another-length"),
        (lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01), "clipped-to-another-length"),
        (clip_by_hand, "changed-differently-on-ranks"),
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")), None),
    ],
    ids=["norm", "value", "by hand", "measured"],
)
@pytest.mark.parametrize("by_hand", [False, True], ids=["DDP", "averaged by hand"])
def test_one_rank_alone_clipping_the_gradient_of_all_is_found(plumbline, clip, cause, by_hand):
    def change(model):
        if by_hand:
            averaged(model)
        if dist.get_rank() == 0:
            clip(model)

    training = trained_after(change) if by_hand else trained_after(change, wrap=DistributedDataParallel)
    checked = plumbline.check(training, ranks=2, steps=STEPS)
    roots = [one.cause for one in checked.findings if one.outcome.is_bad and not one.consequence_of]
    assert roots == [cause] * bool(cause)


def test_samples_that_are_clipped_one_by_one_are_not_accused(plumbline):
    def train():
        model = small()
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            parts = [torch.zeros_like(one) for one in model.parameters()]
            for _ in range(4):
                optimizer.zero_grad()
                loss_of(model).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                for part, one in zip(parts, model.parameters(), strict=True):
                    part += one.grad
            for part, one in zip(parts, model.parameters(), strict=True):
                dist.all_reduce(part)
                one.grad = part / (4 * dist.get_world_size())
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert not [one for one in checked.findings if one.outcome.is_bad]


def test_parameters_that_are_clipped_apart_are_judged(plumbline):
    def clip(model):
        nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)
        nn.utils.clip_grad_value_(model[2].parameters(), 0.001)
        nn.utils.clip_grad_norm_(model.parameters(), 0.005)

    plumbline.check(trained_after(clip), ranks=1, steps=STEPS).assert_right(require_full=True)


def test_the_factors_of_a_script_that_clips_are_not_those_of_its_loss(plumbline):
    def clip(model):
        averaged(model)
        norm = math.hypot(*(float(one.grad.norm()) for one in model.parameters()))
        for one in model.parameters():
            one.grad *= 0.01 / norm

    checked = plumbline.check(trained_after(clip), ranks=2, steps=STEPS)
    checked.assert_right(require_full=True)
    (loss,) = [one.message for one in checked.findings if one.check == "objective"]
    assert loss == "The loss is the mean over all 8 terms of cross_entropy."


def test_that_optimizers_step_within_a_backward_pass_is_told(plumbline):
    checked = plumbline.check(an_optimizer_for_each_parameter, ranks=2, steps=STEPS)
    unjudged = {one.check for one in checked.findings if "step during the backward pass" in one.message}
    assert unjudged == {"samples", "objective"}


@pytest.mark.parametrize("sampler", [None, DistributedSampler])
def test_ranks_that_each_shuffle_an_augmented_data_set_are_noted(plumbline, sampler):
    class Augmented(TensorDataset):
        def __getitem__(self, index):
            inputs, label = super().__getitem__(index)
            return inputs + 0.1 * torch.randn(6), label

    def train():
        torch.manual_seed(0)
        rows = Augmented(torch.randn(24, 6), torch.randint(3, (24,)))
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        loader = DataLoader(rows, 4, sampler=sampler and sampler(rows), shuffle=sampler is None)
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right()
    said = next(one.message for one in checked.findings if one.check == "samples")
    assert ("shuffles a data set of 24 samples by itself" in said) == (sampler is None)


class EveryOther(BatchSampler):
    """Deals the batches of one order out to two ranks, like Accelerate."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), dist.get_rank(), None, 2)

    def __len__(self):
        return super().__len__() // 2


@pytest.mark.parametrize("seed", [0, None], ids=["one order", "an order of each rank"])
def test_ranks_that_share_one_order_divide_it(plumbline, seed):
    def train():
        rows = TensorDataset(torch.randn(24, 6), torch.randint(3, (24,)))
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
        sampler = EveryOther(RandomSampler(rows, generator=generator), 4, drop_last=True)
        for inputs, labels in DataLoader(rows, batch_sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(inputs + dist.get_rank()), labels).backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    said = next(one.message for one in checked.findings if one.check == "samples")
    assert ("shuffles a data set of 24 samples by itself" in said) == (seed is None)


def _averaged(weights):
    dist.all_reduce(weights)
    weights /= dist.get_world_size()


def _taken_from_the_first_rank(weights):
    dist.broadcast(weights, 0)


@pytest.mark.parametrize(
    ("made_equal", "answer"),
    [
        (_averaged, Answer.RIGHT_IN_PART),
        (dist.all_reduce, Answer.WRONG),
        (_taken_from_the_first_rank, Answer.NOT_JUDGED),
    ],
)
@pytest.mark.parametrize("rate", [0.1, 1e-7])
def test_weights_that_a_script_averages_between_steps_are_right_and_their_sum_is_wrong(
    plumbline, made_equal, answer, rate
):
    if rate < 0.1 and answer is Answer.RIGHT_IN_PART:  # rounding hides whether these are averages
        answer = Answer.NOT_JUDGED

    def train():
        model = small()
        optimizer = torch.optim.Adam(model.parameters(), rate)
        torch.manual_seed(dist.get_rank())
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if step % 2:
                for one in model.parameters():
                    made_equal(one.data)

    checked = plumbline.check(train, ranks=2, steps=2 * STEPS)
    (training,) = checked.trainings
    assert answer_of(training) is answer
    assert (training.coverage.gradients.part == 1) == (answer is not Answer.NOT_JUDGED)
    wrong = [one.cause for one in checked.findings if one.outcome.is_bad]
    assert wrong == ["weights-summed-over-ranks"] * (answer is Answer.WRONG)


@pytest.mark.parametrize("seeds", ["alike", "different"])
def test_noise_that_is_the_same_on_all_ranks_is_noted(plumbline, seeds):
    def train():
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(dist.get_rank() if seeds == "different" else 0)
        for _ in range(STEPS):
            inputs, labels = torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(model(inputs + 0.1 * torch.randn(4, 6)), labels).backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right()
    said = " ".join(one.message for one in checked.findings)
    assert (f"draws the same random numbers on all ranks before {STEPS - 1} of {STEPS}" in said) == (seeds == "alike")


@pytest.mark.parametrize("drawn", ["for gradients", "by a loader"])
def test_numbers_that_change_no_samples_are_not_noted(plumbline, drawn):
    def train():
        rows = TensorDataset(torch.randn(8, 6), torch.randint(3, (8,)))
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = DataLoader(rows, 4, sampler=DistributedSampler(rows))
        batches = [*loader]
        for _ in range(STEPS):
            for inputs, labels in loader if drawn == "by a loader" else batches:
                optimizer.zero_grad()
                cross_entropy(model(inputs), labels).backward()
                if drawn == "for gradients":
                    for one in model.parameters():
                        one.grad += 0.1 * torch.randn_like(one)
                optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert not [one for one in checked.findings if "draws the same random numbers" in one.message]


def on_a_batch(loss):
    def of(model):
        inputs, labels = batch()
        return loss(model(inputs), labels)

    return of


def _mean_by_hand(logits, labels):
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()


def _of_several_means(logits, labels):
    return _mean_by_hand(logits, labels) + 0.01 * logits.square().mean()


def _divided_mean(logits, labels):
    return _mean_by_hand(logits, labels) / dist.get_world_size()


def _mean_of_squares(logits, labels, divisor=1.0):
    residual = (logits - nn.functional.one_hot(labels, 3)) / divisor**0.5
    of_features = (residual / torch.tensor([1.0, 2.0, 4.0])).square().mean()
    return residual.square().mean() + (residual * residual).mean() + (residual.abs() ** 2).mean() + of_features


def _mean_of_squares_over_all_ranks(logits, labels):
    return _mean_of_squares(logits, labels, dist.get_world_size())


def _shares_of_all_ranks(power):
    def loss(logits, labels):
        residual = (logits - nn.functional.one_hot(labels, 3)) / dist.get_world_size() ** (1 / power)
        return (residual.abs() ** power).mean() if power > 1 else residual.abs().mean()

    return loss


def _mean_over_one_row(logits, labels):
    return _mean_by_hand(logits[:1], labels[:1]).sum()


def _sum_in_a_mean(logits, labels):
    return -logits.log_softmax(1).gather(1, labels[:, None]).sum().mean()


def _sum_over_one_row(logits, labels):
    return -logits.log_softmax(1).gather(1, labels[:, None])[:1].sum()


def _sum_by_hand(logits, labels):
    return _mean_by_hand(logits, labels) * len(labels)


def _mean_over_all_ranks_and_another(logits, labels):
    own = -logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)[: 2 + dist.get_rank()]
    return own.sum() / 5 + logits.square().mean()


def _masked_mean(logits, labels):
    mask = (labels != 0).float()
    return (cross_entropy(logits, labels, reduction="none") * mask).exp().sub(1).sum() / mask.sum()


def _mean_of_own_tokens(logits, labels):
    mask = (torch.arange(len(labels)) < 2 + dist.get_rank()).float()
    return -(logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1) * mask).sum() / mask.sum()


def _masked_own_tokens(logits, labels):
    mask = (torch.arange(len(labels)) < 2 + dist.get_rank()).float()
    return (cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()


def _mean_of_all_tokens(logits, labels):
    return _mean_of_own_tokens(logits, labels) * (2 + dist.get_rank()) / 5


def _half_the_mean_of_own_tokens(logits, labels):
    return _mean_of_own_tokens(logits, labels) / 2


@pytest.mark.parametrize(
    ("loss", "answer"),
    [
        (_mean_by_hand, Answer.WRONG),
        (_mean_of_own_tokens, Answer.WRONG),
        (_mean_of_all_tokens, Answer.RIGHT),
        (_half_the_mean_of_own_tokens, Answer.NOT_JUDGED),
        (_of_several_means, Answer.WRONG),
        (_mean_of_squares, Answer.WRONG),
        (_divided_mean, Answer.NOT_JUDGED),
        (_mean_of_squares_over_all_ranks, Answer.NOT_JUDGED),
        (_mean_over_all_ranks_and_another, Answer.NOT_JUDGED),
        (_shares_of_all_ranks(1), Answer.NOT_JUDGED),
        (_shares_of_all_ranks(2), Answer.NOT_JUDGED),
        (_mean_over_one_row, Answer.WRONG),
        (_sum_in_a_mean, Answer.NOT_JUDGED),
        (_sum_over_one_row, Answer.NOT_JUDGED),
        (_sum_by_hand, Answer.NOT_JUDGED),
        (_masked_mean, Answer.NOT_JUDGED),
    ],
)
def test_sums_over_ranks_of_means_that_are_written_by_hand_are_wrong(plumbline, loss, answer):
    checked = plumbline.check(lambda: train_steps(small(), loss=on_a_batch(loss), change=summed), ranks=2, steps=STEPS)
    assert answer_of(checked.trainings[0]) is answer
    assert [one.cause for one in checked.findings if one.outcome.is_bad] == ["summed-over-ranks"] * (
        answer is Answer.WRONG
    )


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda *given: 2 * _mean_of_all_tokens(*given), "The loss is the mean over all 5 terms of"),
        (_masked_own_tokens, "The loss is a weighted mean of cross_entropy over 2 ranks: a term counts up to 1.5"),
        (
            _mean_of_own_tokens,
            "The loss is a weighted mean of the script's own loss over 2 ranks: a term counts up to 1.5",
        ),
    ],
)
def test_weights_of_tokens_in_a_loss_that_is_written_by_hand_are_told(plumbline, loss, told):
    def train():
        train_steps(DistributedDataParallel(small()), loss=on_a_batch(loss))

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right(require_full=True)
    assert [one for one in checked.findings if one.check == "objective" and one.message.startswith(told)]


@pytest.mark.parametrize("hooked", ["all", "some"])
def test_sums_over_ranks_of_what_hooks_divide_are_not_judged(plumbline, hooked):
    def train():
        model = small()
        every = [*model.parameters()]
        for one in every if hooked == "all" else every[:1]:
            one.register_hook(lambda gradient: gradient / dist.get_world_size())
        train_steps(model, change=summed)

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    assert answer_of(checked.trainings[0]) is (Answer.NOT_JUDGED if hooked == "all" else Answer.WRONG)


def test_ranks_that_differ_get_no_reason_that_contradicts_what_is_wrong_with_their_gradients(plumbline):
    checked = plumbline.check(trained_after(lambda model: averaged(model[0])), ranks=2, steps=STEPS)
    assert [one.cause for one in checked.findings if one.outcome.is_bad] == ["some-parameters-not-synchronised"]
    assert [one.message for one in checked.findings if one.check == "ranks-agree"] == [
        f"ranks hold different weights after {STEPS} of {STEPS} steps"
    ]


@pytest.mark.parametrize("finds", [False, True])
def test_parameters_for_which_the_wrapper_waits_are_named(plumbline, finds):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = small(), nn.Linear(2, 2)

        def forward(self, inputs):
            return self.used(inputs)

    def train():
        with contextlib.suppress(RuntimeError):  # the wrapper rejects the second forward
            train_steps(DistributedDataParallel(Unused(), find_unused_parameters=finds))

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    hints = [one.hint for one in checked.findings if one.cause == "not-synchronised" and one.check == "gradients"]
    assert len(hints) == (not finds)
    assert all("gradients of spare.weight, spare.bias, which the loss does not use" in one for one in hints)


class RoundsAtRandom(torch.optim.Optimizer):
    """Rounds float32 results to bfloat16 stochastically."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for one in self.param_groups[0]["params"]:
            bits = (one.float() - 0.01 * one.grad.float()).view(torch.int32)
            one.copy_(((bits + torch.randint(2**16, bits.shape, dtype=torch.int32)) & -(2**16)).view(torch.float32))


@pytest.mark.parametrize("seed", [lambda: 0, dist.get_rank], ids=["one seed", "a seed for each rank"])
def test_ranks_that_round_the_same_update_differently_are_told(plumbline, seed):
    def train():
        model = DistributedDataParallel(small().bfloat16())
        optimizer = RoundsAtRandom(model.parameters())
        batches = torch.Generator().manual_seed(dist.get_rank())
        torch.manual_seed(seed())
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=batches).bfloat16()).float().square().mean().backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    (said,) = [one.message for one in checked.findings if one.check == "ranks-agree"]
    assert ("round the result differently" in said) == (seed is dist.get_rank)
    assert not any(one.outcome.is_bad for one in checked.findings)


def test_a_step_in_a_hook_before_the_average_is_wrong_and_the_hint_says_where_it_steps(plumbline):
    checked = plumbline.check(partial(an_optimizer_for_each_parameter, synchronised=False), ranks=2, steps=STEPS)
    wrong = next(one for one in checked.findings if one.outcome.is_bad)
    assert wrong.cause == "not-synchronised"
    assert "average each gradient in the hook that steps" in str(wrong.hint)


def test_a_second_backward_pass_after_one_forward_is_wrong_and_the_hint_says_so(plumbline):
    def train():
        model = DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(STEPS):
            inputs, labels = batch()
            optimizer.zero_grad()
            outputs = model(inputs)
            cross_entropy(outputs, labels).backward(retain_graph=True)
            outputs.square().mean().backward()
            optimizer.step()

    wrong = next(one for one in plumbline.check(train, ranks=2, steps=STEPS).findings if one.outcome.is_bad)
    assert wrong.cause == "some-micro-batches-not-synchronised"
    assert "add up the losses" in str(wrong.hint)


def test_a_state_that_closures_change_within_a_step_is_not_called_changed(plumbline):
    def train():
        model = small()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(STEPS):
            optimizer.step(closure)

    checked = plumbline.check(train, ranks=1, steps=STEPS)
    assert not [one for one in checked.findings if "changed between optimizer steps" in one.message]


def clipped_while_scaled(first):
    """Return a training with hand-written clipping, before or after the GradScaler unscales."""

    def train():
        model = DistributedDataParallel(small())
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if first == "unscale":
                scaler.unscale_(optimizer)
            norm = math.hypot(*(float(one.grad.norm()) for one in model.parameters()))
            for one in model.parameters():
                one.grad *= min(1.0, 0.1 / norm)
            scaler.step(optimizer)
            scaler.update()

    return train


@pytest.mark.parametrize(("first", "cause"), [("clip", "clipped-before-unscaling"), ("unscale", None)])
def test_own_code_that_clips_before_unscaling_is_found(plumbline, first, cause):
    checked = plumbline.check(clipped_while_scaled(first), ranks=2, steps=STEPS)
    assert [one.cause for one in checked.findings if one.outcome.is_bad] == ([cause] if cause else [])


def two_optimizers(*, share):
    def train():
        model = DistributedDataParallel(small())
        torch.manual_seed(dist.get_rank())
        first, *others = model.parameters()
        optimizers = [torch.optim.AdamW([first], 0.01), torch.optim.SGD([first, *others] if share else others, 0.1)]
        for _ in range(STEPS):
            model.zero_grad()
            loss_of(model).backward()
            for optimizer in optimizers:
                optimizer.step()

    return train


@pytest.mark.parametrize("share", [True, False])
def test_a_parameter_that_two_optimizers_step_is_found(plumbline, share):
    checked = plumbline.check(two_optimizers(share=share), ranks=2, steps=STEPS)
    causes = [one.cause for one in checked.findings if one.outcome.is_bad]
    assert causes == (["stepped-by-two-optimizers"] if share else [])


@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_that_another_optimizers_pass_left_are_told(plumbline, zeroes):
    def train():
        generator, critic = small(), nn.Linear(3, 1)
        theirs, its = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
        for _ in range(STEPS):
            made = generator(torch.randn(4, 6))
            theirs.zero_grad()
            critic(made).mean().backward()
            theirs.step()
            if zeroes:
                its.zero_grad()
            critic(made.detach()).square().mean().backward()
            its.step()
            its.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=STEPS)
    checked.assert_right(require_full=True)
    notes = [one.message for one in checked.findings if "before another optimizer's step" in one.message]
    assert len(notes) == (0 if zeroes else 1)


@pytest.mark.parametrize("hooked", [True, False])
def test_hooks_that_run_before_gradients_are_averaged_are_told(plumbline, hooked):
    def train():
        model = DistributedDataParallel(small())
        for one in list(model.parameters())[: 2 if hooked else 0]:
            one.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        train_steps(model)

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right()
    told = [one.message for one in checked.findings if one.message.startswith("the script has hooks on 2 parameters")]
    assert len(told) == hooked


@pytest.mark.parametrize("first_local_step", [1, 100])
def test_gradients_of_local_sgd_are_right_before_and_after_ranks_step_alone(plumbline, first_local_step):
    def train():
        model = DistributedDataParallel(small())
        group = dist.new_subgroups(1)[0]  # each rank by itself, like a node
        model.register_comm_hook(PostLocalSGDState(None, group, first_local_step), post_localSGD_hook)
        averager = PeriodicModelAverager(100, first_local_step)
        train_steps(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager))

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    checked.assert_right()
    (gradients,) = [one.message for one in checked.findings if one.check == "gradients"]
    assert ("averages the weights of all ranks between steps" in gradients) == (first_local_step < STEPS)


def _one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=10)


def _warmed_up(step: int, warm_up: int, steps: int) -> float:
    return min(1, step / warm_up, 1 - step / steps)


@pytest.mark.parametrize(
    ("batches", "made_by", "is_wrong"),
    [
        (5, _one_cycle, False),
        (4, _one_cycle, True),
        (8, _one_cycle, False),
        (4, lambda one: LambdaLR(one, partial(_warmed_up, warm_up=2, steps=10)), True),
        (4, lambda one: LambdaLR(one, lambda step: 1 / (step + 1)), False),
        (4, lambda one: StepLR(one, 10), False),
    ],
)
def test_a_schedule_is_wrong_if_its_length_counts_optimizer_steps(plumbline, batches, made_by, is_wrong):
    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = made_by(optimizer)
        rows = DataLoader(TensorDataset(torch.randn(batches, 6), torch.randint(3, (batches,))), batch_size=1)
        for _ in range(2):
            for number, (inputs, targets) in enumerate(rows):
                (cross_entropy(model(inputs), targets) / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()

    said = str(plumbline.check(train, ranks=1, steps=STEPS))
    assert ("schedule stepped every micro batch" in said) == is_wrong
    assert ("That is right only if it is made for micro-batches" in " ".join(said.split())) != is_wrong


def test_parameters_that_are_clipped_one_by_one_are_right_as_shards(plumbline):
    def train():
        model = small()
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        train_steps(model, change=lambda model: [nn.utils.clip_grad_norm_([one], 0.01) for one in model.parameters()])

    plumbline.check(train, ranks=2, steps=STEPS).assert_right(require_full=True)


def test_settings_that_differ_between_ranks_with_shards_are_found(plumbline):
    def train():
        model = small()
        fully_shard(model)
        train_steps(model, torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1 * dist.get_rank()))

    with pytest.raises(AssertionError, match="wrong: learning-rate: settings differ between ranks"):
        plumbline.check(train, ranks=2, steps=STEPS).assert_right()


class MomentumContrast(nn.Module):
    """An encoder and its momentum copy, updated in each forward, with all ranks' keys in a queue."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys = small(), small()
        self.keys.requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 3))

    def forward(self, inputs):
        queries = self.queries(inputs)
        with torch.no_grad():
            for own, slow in zip(self.queries.parameters(), self.keys.parameters(), strict=True):
                slow.data = 0.5 * slow.data + 0.5 * own.data
            keys = self.keys(inputs + 0.1)
            everywhere = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, keys)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().T], 1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([*everywhere, self.queue])[:8])
        return scores


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_momentum_encoder_that_moves_in_the_forward_is_replayed(plumbline, zeroes):
    def train():
        model = DistributedDataParallel(MomentumContrast())
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.module.queries.parameters(), 0.1)
        for _ in range(STEPS):
            if zeroes:
                optimizer.zero_grad()
            scores = model(torch.randn(4, 6))
            cross_entropy(scores, torch.zeros(4, dtype=torch.long)).backward()
            optimizer.step()

    checked = plumbline.check(train, ranks=2, steps=STEPS)
    if zeroes:
        checked.assert_right(require_full=True)
        assert "its forward returned a different result" not in str(checked)
    else:
        with pytest.raises(AssertionError, match="previous step not zeroed"):
            checked.assert_right()


def micro_batches_of_a_model_whose_forward_a_library_replaced():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    body, head = model[:2], model[2]
    model.forward = lambda inputs: head(body(inputs))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    for number, (inputs, labels) in enumerate(DataLoader(rows, 4)):
        cross_entropy(model(inputs), labels).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_the_batch_of_a_pass_is_that_of_its_outermost_forward(plumbline):
    checked = plumbline.check(micro_batches_of_a_model_whose_forward_a_library_replaced, ranks=1, steps=STEPS)
    assert [one.cause for one in checked.findings if one.outcome.is_bad] == ["not-divided-by-micro-batches"]


class Step(nn.Module):
    """Has no forward, like many LightningModules, and logs the mean loss over all ranks."""

    def __init__(self):
        super().__init__()
        self.net = small()

    def training_step(self, inputs, labels):
        loss = cross_entropy(self.net(inputs), labels)
        dist.all_reduce(loss.detach().clone())
        return loss


def a_step_that_communicates_for_a_log():
    module = Step()
    wrapped = DistributedDataParallel(module)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)

    def redirected(*args):
        del module.forward
        return module.training_step(*args)

    for _ in range(STEPS):
        module.forward = redirected
        optimizer.zero_grad()
        wrapped(*batch()).backward()
        optimizer.step()


def test_a_step_that_communicates_for_a_log_is_judged(plumbline):
    plumbline.check(a_step_that_communicates_for_a_log, ranks=2, steps=STEPS).assert_right(require_full=True)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_clipping_every_micro_batch_is_one_mistake(plumbline, wrap):
    def train():
        model = wrap(small())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(STEPS):
            for _ in range(3):
                inputs, targets = batch()
                (cross_entropy(model(inputs), targets) / 3).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    found = plumbline.check(train, ranks=2, steps=STEPS).findings
    bad = [one.cause for one in found if one.outcome.is_bad and one.consequence_of is None]
    assert bad == ["clipped-every-micro-batch"]


@pytest.mark.parametrize(("averages", "answer"), [(True, Answer.NOT_JUDGED), (False, Answer.WRONG)])
def test_weights_that_are_averaged_only_after_the_recorded_steps_are_not_called_wrong(plumbline, averages, answer):
    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for step in range(2 * STEPS + 1):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if step + 1 == 2 * STEPS:
                for one in model.parameters():
                    _averaged(one.data if averages else one.detach().clone())

    assert answer_of(*plumbline.check(train, ranks=2, steps=STEPS).trainings) is answer
