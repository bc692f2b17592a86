"""No unearned RIGHT: trainings that can be judged only in part or not at all, or whose ranks differ."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard

STEPS = 2


def small(seed=0, classes=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, classes))


def fit(model, *optimizers, classes=4, after_backward=lambda: None, same_data=False):
    torch.manual_seed(0 if same_data else 100 + dist.get_rank())
    for _ in range(STEPS):
        model.zero_grad()
        functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(classes, (8,))).backward()
        after_backward()
        for optimizer in optimizers:
            optimizer.step()


def average(parameters):
    for one in parameters:
        if one.grad is not None:
            dist.all_reduce(one.grad)
            one.grad /= dist.get_world_size()


def sharded(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


@pytest.fixture
def judged(plumbline):
    """Return a function that trains on ranks, and returns the training with its verdict and its reason."""

    def judged(train, ranks=2):
        checked = plumbline.check(train, ranks=ranks, steps=STEPS)
        assert not any(end.has_failed for end in checked.ends), checked.ends
        (training,) = checked.trainings
        return training, answer_of(training), sentence_on(training)

    return judged


def causes(training):
    return {one.cause for one in training.findings if one.outcome.is_bad and one.consequence_of is None}


class TensorParallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, inputs):
        return self.head(self.down(self.up(inputs).relu()))


@pytest.mark.parametrize(("factor", "expected"), [(1, Answer.RIGHT), (3, Answer.NOT_JUDGED)])
def test_tensor_parallelism_is_judged_and_gradients_changed_by_hand_are_not_praised(judged, factor, expected):
    def train():
        torch.manual_seed(0)
        model = TensorParallel()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fit(model, optimizer, after_backward=lambda: model.up.weight.grad.mul_(factor), same_data=True)

    _, answer, _ = judged(train)
    assert answer is expected


def test_where_all_gradients_are_distributed_they_are_judged(judged):
    def train():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fit(model, torch.optim.AdamW(model.parameters()), same_data=True)

    training, answer, _ = judged(train)
    assert answer is Answer.RIGHT
    said = {one.check: one.message for one in training.findings}
    assert "the 1 of 4 parameters that every rank holds in full" in said["ranks-agree"]
    assert "the same 1 of 4 parameters" in said["initial-weights"]


def a_new_head(model, optimizer):
    model[4] = nn.Linear(8, 4)
    return model


@pytest.mark.parametrize(
    "replace",
    [lambda model, _: sharded(model), lambda model, _: DistributedDataParallel(small()), a_new_head],
    ids=["fully_shard", "another-model", "a-new-layer"],
)
def test_an_optimizer_made_before_its_parameters_were_replaced_is_named(judged, replace):
    def train():
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        fit(replace(model, optimizer), optimizer)

    training, answer, sentence = judged(train, ranks=1 if replace is a_new_head else 2)
    assert answer is Answer.WRONG
    assert "optimizer-holds-other-parameters" in causes(training)
    assert "optimizer holds other parameters" in sentence


def test_a_second_model_that_is_not_called_yet_is_no_mistake(judged):
    def train():
        model, later = small(), nn.Linear(3, 5)
        fit(model, torch.optim.SGD(model[2:].parameters(), 0.1), torch.optim.SGD(later.parameters(), 0.1))

    _, answer, _ = judged(train, ranks=1)
    assert answer is Answer.RIGHT_IN_PART


@pytest.mark.parametrize("when", ["in-hooks", "before-the-step"])
def test_ranks_that_average_gradients_of_different_models_are_wrong(judged, when):
    def train():
        model = small(seed=dist.get_rank())
        if when == "in-hooks":
            for one in model.parameters():
                one.register_post_accumulate_grad_hook(lambda one: average([one]))
        after = (lambda: average(model.parameters())) if when == "before-the-step" else lambda: None
        fit(model, torch.optim.SGD(model.parameters(), 0.1), after_backward=after)

    training, answer, _ = judged(train)
    assert answer is Answer.WRONG
    assert causes(training) == {"not-broadcast"}


class LowRank(nn.Module):
    """A frozen layer and a low-rank update whose second factor starts as zeros."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.a.T @ self.b.T


@pytest.mark.parametrize("difference", [0, 0.02])
def test_adapters_that_differ_between_ranks_are_found_though_their_first_gradient_is_zero(judged, difference):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(LowRank(nn.Linear(6, 8)), nn.ReLU(), LowRank(nn.Linear(8, 4)))
        with torch.no_grad():
            model[0].a.mul_(1 + difference * dist.get_rank())
        parameters = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(parameters, 0.1)
        fit(model, optimizer, after_backward=lambda: average(parameters))

    training, answer, _ = judged(train)
    assert answer is (Answer.WRONG if difference else Answer.RIGHT)
    assert causes(training) == ({"not-broadcast"} if difference else set())


def test_parameters_that_one_rank_does_not_optimise_are_named(judged):
    def train():
        model = DistributedDataParallel(small())
        parameters = list(model.parameters())
        fit(model, torch.optim.SGD(parameters if dist.get_rank() == 0 else parameters[:2], 0.1))

    training, answer, _ = judged(train)
    assert answer is Answer.WRONG
    assert causes(training) == {"missing-on-some-ranks"}
    assert not any("different steps" in one.message for one in training.findings)


@pytest.mark.parametrize("equal", [True, False], ids=["shares-of-equal-shapes", "other-shapes"])
def test_ranks_that_divide_the_optimizer_and_share_the_weights_are_judged(judged, equal):
    def train():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) if equal else small()
        model = DistributedDataParallel(layers)
        parameters = list(model.parameters())
        shares = [parameters[:2], parameters[2:]]

        def share():
            for owner, own in enumerate(shares):
                for one in own:
                    dist.broadcast(one.data, owner)

        optimizer = torch.optim.SGD(shares[dist.get_rank()], 0.1)
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(STEPS):
            model.zero_grad()
            functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
            optimizer.step()
            share()

    training, answer, _ = judged(train)
    assert answer is Answer.RIGHT
    assert training.coverage.gradients.part == 1


@pytest.mark.parametrize("width", [8, 4])
def test_parts_of_a_model_with_equal_names_are_not_compared(judged, width):
    def train():
        torch.manual_seed(dist.get_rank())
        part = nn.Sequential(nn.Linear(6, 8 if dist.get_rank() else width))
        fit(part, torch.optim.SGD(part.parameters(), 0.1))

    _, answer, sentence = judged(train)
    assert answer is Answer.NOT_JUDGED
    assert "could not be judged" not in sentence


class Experts(nn.Module):
    """Each rank has its own expert, to which all ranks send some of their samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = self.first(inputs).relu()
        back = Exchange.apply(self.expert(Exchange.apply(hidden)))
        return self.head(hidden + back)


class Exchange(torch.autograd.Function):
    """Swaps half of each rank's rows with the other rank; the backward swaps their gradients."""

    @staticmethod
    def forward(ctx, rows):
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    backward = forward


@pytest.mark.parametrize("communicates", [True, False])
def test_only_where_the_forward_communicates_are_other_weights_on_each_rank_experts(judged, communicates, monkeypatch):
    if not communicates:
        monkeypatch.setattr(Exchange, "forward", staticmethod(lambda ctx, rows: rows.clone()))
        monkeypatch.setattr(Exchange, "backward", staticmethod(lambda ctx, rows: rows.clone()))

    training, answer, _ = judged(partial(train_experts, divided=communicates))
    if communicates:
        assert answer is Answer.RIGHT
    else:
        assert causes(training) == {"some-parameters-not-synchronised"}


def test_experts_that_add_up_the_gradients_of_all_ranks_rows_are_wrong(judged):
    training, answer, _ = judged(partial(train_experts, divided=False))
    assert answer is Answer.WRONG
    assert causes(training) == {"some-tensors-summed"}


def train_experts(divided):
    model = Experts()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight", "expert.bias"])

    def divide():
        for one in model.expert.parameters() if divided else ():
            one.grad /= dist.get_world_size()

    fit(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1), after_backward=divide)


class SplitByHand(nn.Module):
    """A layer divided by hand: the gradients of its input, which both halves use, are not summed."""

    def __init__(self, apart):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        torch.manual_seed(1 + apart * dist.get_rank())
        self.up, self.down = nn.Linear(8, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, inputs):
        return AddUp.apply(self.down(self.up(self.first(inputs)).tanh()))


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("apart", [True, False], ids=["other-halves", "equal-halves"])
def test_halves_of_a_layer_are_not_praised_even_where_they_begin_equal(judged, apart):
    def train():
        model = SplitByHand(apart)
        fit(model, torch.optim.SGD(model.parameters(), 0.1), same_data=True)

    training, answer, _ = judged(train)
    assert answer in (Answer.RIGHT_IN_PART, Answer.NOT_JUDGED)
    (why,) = (one.why for one in training.coverage.gradients.left_out if "first.weight" in one.names)
    assert "right for shards, but wrong for replicas" in why


@pytest.mark.parametrize("shared", [True, False], ids=["of-the-same-weights", "of-another-model"])
def test_an_optimizer_that_begins_after_the_recorded_steps_is_left_out_of_the_share(judged, shared):
    def train():
        model = small()
        fit(model, torch.optim.SGD(model[4].parameters(), 0.1))
        later = model if shared else small()
        fit(later, torch.optim.SGD(later.parameters(), 0.1))

    training, answer, sentence = judged(train, ranks=1)
    assert answer is Answer.RIGHT_IN_PART
    assert sentence.startswith("18 % of gradients and updates judged")
    assert "took no step during the recording" in training.coverage.gradients.left_out[0].why
    assert not shared or not any("in no optimizer" in one.message for one in training.findings)


@pytest.mark.parametrize(
    ("classes", "rate", "sentence"),
    [(1, 0.1, "every gradient was zero"), (4, 0.0, "check whether the learning rate is 0")],
)
def test_where_nothing_could_have_differed_nothing_is_right(judged, classes, rate, sentence):
    def train():
        model = DistributedDataParallel(small(classes=classes))
        fit(model, torch.optim.SGD(model.parameters(), rate), classes=classes)

    _, answer, said = judged(train)
    assert answer is Answer.NOT_JUDGED
    assert sentence in said


class AveragesInStep(torch.optim.Optimizer):
    """An optimizer that averages gradients itself, or divides its work among ranks, or forgets to."""

    def __init__(self, parameters, way):
        super().__init__(parameters, {"lr": 0.1})
        self.way = way

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for index, one in enumerate(group["params"]):
                update = one.grad.clone()
                if self.way == "averages":
                    dist.all_reduce(update)
                    update /= dist.get_world_size()
                if self.way == "shares":
                    dist.broadcast(update, index % dist.get_world_size())
                if self.way == "forgets":
                    dist.all_reduce(torch.zeros(1))
                one.sub_(update, alpha=group["lr"])


def test_an_optimizer_that_averages_inside_its_step_is_not_accused_and_not_praised(judged):
    def train():
        model = small()
        fit(model, AveragesInStep(model.parameters(), "averages"))

    _, answer, sentence = judged(train)
    assert answer is Answer.NOT_JUDGED
    assert "the optimizer's step communicates" in sentence


def test_an_optimizer_whose_step_communicates_but_leaves_ranks_apart_is_wrong(judged):
    def train():
        model = small()
        fit(model, AveragesInStep(model.parameters(), "forgets"))

    training, answer, _ = judged(train)
    assert answer is Answer.WRONG
    assert "not-synchronised" in causes(training)


@pytest.mark.parametrize("averages", [True, False])
def test_an_optimizer_that_sends_only_weights_does_not_make_up_for_a_missing_average(judged, averages):
    def train():
        model = small()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        fit(model, optimizer, after_backward=partial(average, [*model.parameters()] if averages else []))

    training, answer, _ = judged(train)
    assert answer is (Answer.RIGHT if averages else Answer.WRONG)
    assert causes(training) == (set() if averages else {"not-synchronised"})


def test_updates_that_communicate_are_judged_in_a_world_of_one_rank(judged):
    def train():
        model = DistributedDataParallel(small())
        matrices = AveragesInStep([one for one in model.parameters() if one.dim() == 2], "shares")
        fit(model, matrices, torch.optim.SGD([one for one in model.parameters() if one.dim() == 1], 0.1))

    training, answer, sentence = judged(train)
    assert answer is Answer.RIGHT
    assert sentence.startswith("100 % of gradients and updates judged")
    assert not training.coverage.updates.left_out


def test_gradients_divided_by_hand_are_right_although_some_are_zero_at_first(judged):
    def train():
        model = small()
        nn.init.zeros_(model[4].weight)
        wrapped = DistributedDataParallel(model)
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[4], model[:4])]
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(STEPS):
            wrapped.zero_grad()
            with wrapped.no_sync():
                functional.cross_entropy(wrapped(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
            functional.cross_entropy(wrapped(torch.randn(8, 6)), torch.randint(4, (8,))).backward()
            for one in wrapped.parameters():
                one.grad /= 2
            for optimizer in optimizers:
                optimizer.step()

    _, answer, sentence = judged(train)
    assert answer is Answer.RIGHT, sentence


@pytest.mark.parametrize("together", [True, False])
def test_shards_that_are_shortened_by_factors_of_their_own_are_named(judged, together):
    def train():
        model = sharded(small())
        parameters = list(model.parameters())

        def shorten():
            square = torch.stack([one.grad.to_local().square().sum() for one in parameters]).sum()
            if together:
                dist.all_reduce(square)
            for one in parameters:
                one.grad.to_local().mul_(0.05 / square.sqrt())

        fit(model, torch.optim.SGD(parameters, 0.1), after_backward=shorten)

    training, answer, _ = judged(train)
    assert causes(training) == (set() if together else {"clipped-shard-by-shard"})
    assert answer is (Answer.RIGHT if together else Answer.WRONG)


def test_nothing_contradicts_that_one_of_two_modules_is_not_synchronised(judged):
    def train():
        torch.manual_seed(0)
        body, head = DistributedDataParallel(nn.Linear(6, 8)), nn.Linear(8, 4)
        model = nn.Sequential(body, nn.Tanh(), head)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(STEPS):
            model.zero_grad()
            functional.cross_entropy(head(body(torch.randn(8, 6))), torch.randint(4, (8,))).backward()
            optimizer.step()

    training, answer, _ = judged(train)
    assert (answer, causes(training)) == (Answer.WRONG, {"some-parameters-not-synchronised"})
    messages = {one.check: one.message for one in training.findings}
    assert "; Linear.weight (4×8), Linear.bias (4) are outside DistributedDataParallel, which" in messages["gradients"]
    assert messages["ranks-agree"].endswith("DistributedDataParallel wraps only some of the trained modules")
    assert messages["objective"] == "Rank 0's own loss is the mean over its 8 terms of cross_entropy."
    assert messages["samples"].endswith("(32 rows in the recorded steps)")


def test_parameters_that_keep_only_the_last_micro_batch_are_named(plumbline):
    def train():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(3):
                model[0].weight.grad = None
                (functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,))) / 3).backward()
            optimizer.step()

    (training,) = plumbline.check(train, ranks=1, steps=STEPS).trainings
    assert (answer_of(training), causes(training)) == (Answer.WRONG, {"micro-batch-missing"})
