"""Notes on single-rank trainings: likely mistakes are listed under the verdict, and right trainings have none."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from plumbline.check.judge.noted import HeadlineNote

STEPS = 3


@pytest.fixture
def notes(plumbline):
    """Return a function that trains on one rank, and returns the notes."""

    def notes(train, *arguments):
        checked = plumbline.check(lambda: train(*arguments), ranks=1, steps=STEPS)
        checked.assert_right()
        return [one.message for one in checked.findings if isinstance(one, HeadlineNote)]

    return notes


def fit(model, loss_of, optimizer=None, steps=STEPS, passes=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of().backward()
        optimizer.step()


# Hand-written losses


def accumulating(divisor):
    model = nn.Linear(4, 3)
    fit(model, lambda: (model(torch.randn(5, 4)) - 1).square().mean() / divisor, passes=4)


def summing_on_purpose():
    model = nn.Linear(4, 3)
    fit(model, lambda: (model(torch.randn(5, 4)) - 1).square().sum(), passes=4)


def dividing_by_all_tokens():
    model = nn.Linear(4, 3)
    counts = iter([3, 4, 5, 2] * STEPS)
    fit(model, lambda: (model(torch.randn(5, 4)) - 1).square().sum(1)[: next(counts)].sum() / 14, passes=4)


def two_networks():
    """A generator and a discriminator take turns; the discriminator's passes use two kinds of rows."""
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (generator, discriminator)]
    for _ in range(STEPS):
        optimizers[1].zero_grad()
        (discriminator(torch.randn(5, 4)) - 1).square().mean().backward()
        discriminator(generator(torch.randn(5, 4)).detach()).square().mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (discriminator(generator(torch.randn(5, 4))) - 1).square().mean().backward()
        optimizers[0].step()


def two_models_before_their_steps(divisor):
    """Both models accumulate two micro-batches before the first one steps."""
    models = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2):
            for model, part in zip(models, (divisor, 2), strict=True):
                (functional.mse_loss(model(torch.randn(5, 4)), torch.ones(5, 3)) / part).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("divisor", [1, 2])
def test_each_of_two_models_has_its_own_micro_batches_and_loss(plumbline, divisor):
    checked = plumbline.check(lambda: two_models_before_their_steps(divisor), ranks=1, steps=STEPS)
    checked.assert_right()
    notes = [one.message for one in checked.findings if isinstance(one, HeadlineNote)]
    losses = [one.message for one in checked.findings if "terms of mse_loss" in one.message]
    if divisor == 1:
        (note,) = notes
        assert "gradient of optimizer 0 is the sum over 2 micro-batches" in note
    else:
        assert notes == []
    total = "twice " if divisor == 1 else ""
    assert [one.split(" terms")[0] for one in losses] == [
        f"The loss of optimizer 0 is {total}the mean over all 30",
        "The loss of optimizer 1 is the mean over all 30",
    ]


def test_a_loss_is_known_that_waits_for_the_backward_pass_of_another_model(plumbline):
    def train():
        models = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for _ in range(STEPS):
            inputs = torch.randn(5, 4)
            known = functional.mse_loss(models[1](inputs), torch.ones(5, 3))
            for loss in ((models[0](inputs) * torch.rand(5, 3)).mean(), known):
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=STEPS)
    assert any("The loss of optimizer 1 is the mean over all 15" in one.message for one in checked.findings)


def test_micro_batches_that_nobody_divides_are_told_whatever_computes_the_loss(notes):
    (said,) = notes(accumulating, 1)
    assert said == (
        "The gradient is the sum over 4 micro-batches, not their mean. Divide the loss by 4 if a mean is intended."
    )


# Weights in 16 bits


def in_bfloat16(rate, optimizer=torch.optim.Adam, schedule=None):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    made = optimizer(model.parameters(), rate)
    scheduler = schedule(made) if schedule else None
    for _ in range(STEPS):
        made.zero_grad()
        cross_entropy(model(torch.randn(8, 16).bfloat16()), torch.randint(4, (8,))).backward()
        made.step()
        if scheduler:
            scheduler.step()


class Compensated(torch.optim.Adam):
    """Stands in for optimizers that keep rounding errors."""


def warming_up(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=1000)


def test_updates_that_round_to_nothing_are_told(notes):
    (said,) = notes(in_bfloat16, 1e-6)
    assert "of the 676 bfloat16 weights that have a gradient change at all; the other updates are lost" in said


def muon(parameters, rate):
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], rate)


@pytest.mark.parametrize(
    ("optimizer", "weights"),
    [
        (torch.optim.AdamW, 676),
        pytest.param(muon, 640, marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="an older torch")),
    ],
)
def test_weight_decay_that_rounds_to_nothing_is_told(notes, optimizer, weights):
    said = [one for one in notes(in_bfloat16, 1e-2, optimizer) if "in no optimizer" not in one]  # biases, for Muon
    assert [f"Weight decay changes none of {weights} bfloat16 weights" in one for one in said] == [True]


class WithCopies(torch.optim.AdamW):
    """Keeps its weights in float32, and rounds them after each step."""

    def __init__(self, weights, lr):
        super().__init__(weights, lr)
        self.wide = [one.detach().float() for group in self.param_groups for one in group["params"]]
        self.own = torch.optim.AdamW(self.wide, lr)

    @torch.no_grad()
    def step(self, closure=None):
        weights = [one for group in self.param_groups for one in group["params"]]
        for one, wide in zip(weights, self.wide, strict=True):
            wide.grad = None if one.grad is None else one.grad.float()
        self.own.step()
        for one, wide in zip(weights, self.wide, strict=True):
            one.copy_(wide)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.AdamW, fused=True), partial(torch.optim.AdamW, weight_decay=1.0), WithCopies],
)
def test_weight_decay_that_counts_is_not_told(notes, optimizer):
    assert notes(in_bfloat16, 1e-2, optimizer) == []


# Untied parameters


class Tied(nn.Module):
    def __init__(self, declares=False):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=declares)
        self.embedding = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        if not declares:
            self.head.weight = self.embedding.weight

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def fit_tied(model):
    def loss():
        tokens = torch.randint(12, (4, 5))
        return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    fit(model, loss)


def on_meta():
    with torch.device("meta"):
        return Tied()


def untied_by_to_empty(retie=False):
    model = on_meta().to_empty(device="cpu")
    for one in model.parameters():
        nn.init.normal_(one)
    if retie:
        model.head.weight = model.embedding.weight
    fit_tied(model)


def untied_by_loading():
    model = on_meta()
    weights = {name: value.clone() for name, value in Tied().state_dict().items()}
    model.load_state_dict(weights, assign=True)
    fit_tied(model)


def never_tied_though_declared():
    fit_tied(Tied(declares=True))


def tied():
    fit_tied(Tied().double().to("cpu"))


def untied_on_purpose():
    model = Tied()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    fit_tied(model)


def a_copy_of_a_tied_model():
    fit_tied(copy.deepcopy(Tied()))


@pytest.mark.parametrize("train", [untied_by_to_empty, untied_by_loading])
def test_a_tie_that_is_lost_is_told(notes, train):
    (said,) = notes(train)
    assert said.startswith("embedding.weight and head.weight were one parameter when the model was built")


def test_a_tie_that_the_configuration_asks_for_and_nobody_makes_is_told(notes):
    (said,) = notes(never_tied_though_declared)
    assert "has tie_word_embeddings, but embedding.weight and head.weight are two parameters" in said


# Auxiliary losses


class Experts(nn.Module):
    """Stores its balancing loss, returns it, or both; ``logged``: a number only for logs."""

    def __init__(self, returned=None):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.returned = returned

    def forward(self, inputs):
        shares = self.gate(inputs).softmax(1)
        outputs = sum(shares[:, i : i + 1] * one(inputs) for i, one in enumerate(self.experts))
        balance = shares.mean(0).square().sum()
        self.entropy = -(shares * shares.log()).sum(1).mean()
        if self.returned is None:
            self.aux_loss = balance
            self.losses_of_parts = {"first": shares[:, 0].square().mean()}
        return {None: outputs, "tuple": (outputs, balance), "dict": {"logits": outputs, "aux": balance}}[self.returned]


def experts(returned=None, *, used=False):
    model = Experts(returned)

    def loss():
        made, targets = model(torch.randn(8, 6)), torch.randint(6, (8,))
        if returned is None:
            parts = [model.aux_loss, model.losses_of_parts["first"]]
            return cross_entropy(made, targets) + (sum(parts) if used else 0)
        outputs, balance = made if returned == "tuple" else made.values()
        return cross_entropy(outputs, targets) + (0.1 * balance if used else 0)

    fit(model, loss)


def experts_used(returned):
    experts(returned, used=True)


class OwnLoss(nn.Module):
    """Computes a loss that a script need not use, and values for logs."""

    def __init__(self, fields):
        super().__init__()
        self.net, self.scale, self.fields = nn.Linear(6, 3), nn.Parameter(torch.ones(3)), fields

    def forward(self, inputs, labels):
        scores = self.net(inputs) * self.scale
        loss = functional.cross_entropy(scores, labels)
        self.smoothed_loss = 0.9 * loss
        return {"loss": loss, "scores": scores} if self.fields else (scores, loss)


class OwnLossOfParts(OwnLoss):
    """Adds to its loss in place, like MoE models."""

    def forward(self, inputs, labels):
        made = super().forward(inputs, labels)
        made["loss"] += 0.1 * self.net.weight.square().sum()
        return made


def a_loss_of_its_own(fields, model=OwnLoss):
    model = model(fields)

    def loss():
        labels = torch.randint(3, (8,))
        made = model(torch.randn(8, 6), labels)
        return functional.nll_loss((made["scores"] if fields else made[0]).log_softmax(1), labels, torch.ones(3) * 2)

    fit(model, loss)


def the_models_loss():
    model = OwnLoss(True)
    fit(model, lambda: model(torch.randn(8, 6), torch.randint(3, (8,)))["loss"])


@pytest.mark.parametrize(
    ("returned", "name"),
    [
        (None, "Experts.aux_loss, Experts.losses_of_parts"),
        ("tuple", "output 1 of Experts"),
        ("dict", "aux in the output of Experts"),
    ],
)
def test_an_auxiliary_loss_that_no_backward_pass_uses_is_told(notes, returned, name):
    (said,) = notes(experts, returned)
    assert said.startswith(f"The model computes {name} with gradients, but no recorded backward pass uses")


RIGHT = [
    (accumulating, 4),
    (summing_on_purpose,),
    (dividing_by_all_tokens,),
    (two_networks,),
    (in_bfloat16, 1e-2),
    (in_bfloat16, 1e-6, Compensated),
    (in_bfloat16, 1e-6, torch.optim.Adam, warming_up),
    (tied,),
    (untied_by_to_empty, True),
    (untied_on_purpose,),
    (a_copy_of_a_tied_model,),
    (experts_used, None),
    (experts_used, "tuple"),
    (experts_used, "dict"),
    (a_loss_of_its_own, False),
    (a_loss_of_its_own, True),
    (a_loss_of_its_own, True, OwnLossOfParts),
    (the_models_loss,),
]


@pytest.mark.parametrize(
    "train", RIGHT, ids=lambda train: "-".join(getattr(one, "__name__", str(one)) for one in train)
)
def test_a_right_training_has_no_note(notes, train):
    assert notes(*train) == []


# Weights that move between the backward passes of a step


def sharpness_aware():
    model, data = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        cross_entropy(model(data), torch.zeros(8, dtype=torch.long)).backward()
        moves = [0.1 * one.grad for one in model.parameters()]
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one.add_(move)
        optimizer.zero_grad()
        cross_entropy(model(data), torch.zeros(8, dtype=torch.long)).backward()
        with torch.no_grad():
            for one, move in zip(model.parameters(), moves, strict=True):
                one.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def test_no_weight_is_told_of_a_loss_at_weights_that_moved(plumbline):
    findings = plumbline.check(sharpness_aware, ranks=1, steps=STEPS).findings
    objective = [(one.outcome.value, one.message) for one in findings if one.check == "objective"]
    assert objective == [("skipped", "the loss is not known: the weights change between the backward passes of a step")]
