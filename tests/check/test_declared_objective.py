"""A declared objective is compared with the weight that each token and sample has in a step's gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from plumbline.check.function import check_function
from plumbline.check.judge.objective import judge_objective
from plumbline.check.rank.observers.loss_terms import NOT_ROWS, LossTerms, rows_among, samples_in
from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on

WORDS, LONGEST, PASSES = 11, 9, 2


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, words):
        return self.head(self.embedding(words).tanh().cumsum(1))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def over_ranks(number):
    total = torch.tensor(float(number))
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def batches(samples):
    """Return words, labels and label mask of each micro-batch of a step; all lengths differ."""
    lengths = torch.randint(2, LONGEST, (PASSES, samples)) + 2 * rank()
    made = []
    for own in lengths.clamp(max=LONGEST):
        words = torch.randint(WORDS, (samples, LONGEST + 1))
        mask = (torch.arange(LONGEST) < own[:, None]).float()
        made.append((words[:, :-1], words[:, 1:].masked_fill(mask == 0, -100), mask))
    return made


def training(loss_of, before_step=lambda model, step: None, samples=3, wrap=True):
    """Return a function that creates a model and returns a function that takes a step.

    ``loss_of(scores, labels, mask, step)`` is its loss; ``step`` has the micro-batches.
    """

    def make():
        model = Words()
        if wrap and dist.is_initialized():
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def take():
            step = batches(samples)
            for words, labels, mask in step:
                loss_of(model(words), labels, mask, step).backward()
            before_step(model, step)
            optimizer.step()
            optimizer.zero_grad()

        return take

    return make


def ce(scores, labels, reduction="mean"):
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction=reduction)


def surprise(scores, labels):
    """Return each token's loss, written by hand."""
    return -scores.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)


def tokens(step):
    return sum(float(mask.sum()) for *_, mask in step)


# Mistakes of public trainers, rewritten


def torchtitan_2206(scores, labels, mask, step):
    """torchtitan#2206: the mean of each micro-batch, divided by their number."""
    return ce(scores, labels) / PASSES


def verl_7200(scores, labels, mask, step):
    """verl#7200: a hand-written distillation loss is normalised in each micro-batch, and then summed."""
    teacher = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - scores.log_softmax(-1))).sum(-1)
    return (divergence * mask).sum() / mask.sum()


def prime_rl_2358(scores, labels, mask, step):
    """prime-rl#2358: each rank divides by the number of its own tokens."""
    return (surprise(scores, labels) * mask).sum() / tokens(step)


def by_world(scores, labels, mask, step):
    """The factor that undoes the mean over ranks occurs twice."""
    return ce(scores, labels, "sum") / over_ranks(tokens(step)) * world() ** 2


def per_sample(scores, labels, mask, step):
    own = (surprise(scores, labels) * mask).sum(1) / mask.sum(1)
    return own.mean() / PASSES


def the_token_mean(scores, labels, mask, step):
    return ce(scores, labels, "sum") * world() / over_ranks(tokens(step))


def forgotten(scores, labels, mask, step):
    return ce(scores, labels, "sum")


WRONG = [
    (torchtitan_2206, "token-mean", "mean-of-micro-batch-means"),
    (verl_7200, "token-mean", "sum-of-micro-batch-means"),
    (prime_rl_2358, "token-mean", "mean-of-rank-means"),
    (by_world, "token-mean", "scaled-by-a-constant"),
    (per_sample, "token-mean", "mean-over-samples"),
    (the_token_mean, "sample-mean", "mean-over-tokens"),
    (forgotten, "sum", "scaled-by-a-constant"),
]


@pytest.fixture(scope="module")
def recorded():
    """Return two ranks' recordings of all trainings, which took a step each."""
    trainings = [training(loss) for loss, *_ in WRONG] + [make for make, _ in RIGHT]

    def train():
        made = [make() for make in trainings]
        torch.manual_seed(7 + rank())
        for take in made:
            take()

    checked = check_function(train, 2, steps=2)
    assert not any(end.has_failed for end in checked.ends), checked.ends[0].stderr
    return checked.trainings[0].training


def judged(recorded, optimizer, declared):
    """Return the findings about the training of one optimizer."""
    ranks = [
        replace(rank, steps=tuple(step for step in rank.steps if step.optimizer == optimizer))
        for rank in recorded.ranks
    ]
    (found,) = judge_objective(replace(recorded, ranks=tuple(ranks), objective=declared))
    return found


@pytest.mark.parametrize("place", range(len(WRONG)), ids=[loss.__name__ for loss, *_ in WRONG])
def test_another_objective_is_found_and_named(recorded, place):
    _, declared, cause = WRONG[place]
    found = judged(recorded, place, declared)
    assert (found.outcome.value, found.cause) == ("failed", cause)


# Right, although unusual


def summed(scores, labels, mask, step):
    """The sum over tokens, with the mean over ranks undone."""
    return ce(scores, labels, "sum") * world()


def by_hand(scores, labels, mask, step):
    """Each rank has its own mean; gradients are weighted by its token count when they are reduced."""
    return (surprise(scores, labels) * mask).sum() / tokens(step)


def weighted(model, step):
    own = tokens(step)
    total = over_ranks(own)
    for one in model.parameters():
        one.grad *= own / total
        dist.all_reduce(one.grad)


def divided_later(model, step):
    total = over_ranks(tokens(step))
    for one in model.parameters():
        one.grad *= world() / total


def clipped_by_hand(model, step):
    norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
    for one in model.parameters():
        one.grad *= 0.01 / norm


def unreduced(scores, labels, mask, step):
    each = functional.cross_entropy(scores.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() * world() / over_ranks(tokens(step))


def ignored(scores, labels, mask, step):
    each = functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    return each.sum() * world() / over_ranks(tokens(step))


def with_a_penalty(scores, labels, mask, step):
    return the_token_mean(scores, labels, mask, step) + 0.01 * scores.square().mean() / PASSES


def over_samples(scores, labels, mask, step):
    own = torch.where(mask.bool(), surprise(scores, labels), 0.0).sum(1) / mask.sum(1)
    return own.sum() / (PASSES * 3)


RIGHT = [
    (training(the_token_mean), "token-mean"),
    (training(by_hand, weighted, wrap=False), "token-mean"),
    (training(lambda *of: ce(*of[:2], "sum"), divided_later), "token-mean"),
    (training(the_token_mean, clipped_by_hand), "token-mean"),
    (training(unreduced), "token-mean"),
    (training(ignored), "token-mean"),
    (training(with_a_penalty), "token-mean"),
    (training(over_samples), "sample-mean"),
    (training(summed), "sum"),
]


@pytest.mark.parametrize("place", range(len(RIGHT)))
def test_a_right_objective_is_not_accused(recorded, place):
    found = judged(recorded, len(WRONG) + place, RIGHT[place][1])
    assert found.outcome.value == "passed"


# What is reported, and what is not


class Experts(Words):
    def forward(self, words):
        scores = super().forward(words)
        return {"scores": scores, "aux_loss": scores.softmax(-1).square().mean()}


def a_loss_of_several(plumbline):
    def train():
        model = Experts()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            words, labels, _ = batches(3)[0]
            made = model(words)
            penalty = torch.cat([one.flatten() for one in model.head.parameters()]).norm()
            (ce(made["scores"], labels) + 0.01 * made["aux_loss"] + 0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()

    return plumbline.check(train, 1, steps=2)


def test_terms_that_are_no_loss_functions_are_read_off_the_graph(plumbline):
    told = [finding.message for finding in a_loss_of_several(plumbline).findings if finding.check == "objective"]
    assert told[1] == (
        "The loss of each backward pass is cross_entropy + 0.01 × aux_loss in the output of Experts + 0.1 × a norm."
    )


def test_masked_entries_of_a_known_loss_may_be_no_tokens(plumbline):
    def train():
        model, mask = nn.Linear(4, 4), torch.ones(5, 4)
        mask[2:] = 0
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            made, wanted = model(torch.randn(5, 4)), torch.randn(5, 4)
            (functional.mse_loss(made * mask, wanted * mask, reduction="sum") / mask.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    (one,) = plumbline.check(train, 1, steps=2, objective="token-mean").trainings
    assert sentence_on(one).startswith("objective: it is not known which entries of the loss are tokens")


def test_what_is_no_known_loss_is_not_judged_if_it_was_asked_for(plumbline):
    def train():
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            made = model(torch.randn(5, 4))
            torch.logsumexp((made @ made.T).flatten(), 0).backward()
            optimizer.step()
            optimizer.zero_grad()

    (one,) = plumbline.check(train, 1, steps=2, objective="token-mean").trainings
    assert answer_of(one) is Answer.NOT_JUDGED
    assert sentence_on(one) == (
        "objective: the loss is a number (Logsumexp), and the weights of its tokens cannot be read from it"
    )


LABELS = torch.tensor([[1, 2, -100], [1, -100, -100]])
MASK = (LABELS >= 0).float()
LEVELS = [
    (lambda x: (x * MASK).sum() / MASK.sum(), [3.0], [[2.0, 2 / 3, True], [1.0, 1 / 3, True]]),
    (lambda x: ((x * MASK).sum(1) / MASK.sum(1)).mean(), [3.0], [[2.0, 0.5, True], [1.0, 0.5, True]]),
    (lambda x: x[MASK.bool()].mean(), [3.0], [[2.0, 2 / 3, True], [1.0, 1 / 3, True]]),
    (lambda x: torch.where(MASK.bool(), x, 0.0).sum(), [3.0], [[2.0, 2.0, True], [1.0, 1.0, True]]),
    (lambda x: -(torch.tensor([[0.3], [-2.0]]) * x * MASK).sum(), [3.0], [[2.0, 2.0, True], [1.0, 1.0, True]]),
    # A sum over a dimension may be over words or over tokens.
    (lambda x: x.sum(1).mean(), [2.0, 6.0], None),
    # Zeros in a factor leave tokens out without a mask.
    (lambda x: (x * torch.tensor([[0.3], [0.0]])).sum(), [], None),
]


@pytest.mark.parametrize("place", range(len(LEVELS)))
def test_the_tokens_of_a_sum_written_by_hand_are_those_that_its_mask_keeps(place):
    loss, terms, rows = LEVELS[place]
    root = loss(torch.randn(2, 3, requires_grad=True).exp())
    found = LossTerms(root.grad_fn, {}, {}, 2)
    root.backward()
    (term,) = found.terms
    assert [level["terms"] for level in term.levels] == terms
    assert rows is None or [pytest.approx(row) for row in rows] == term.levels[0]["rows"]


class Skips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2


@pytest.mark.parametrize(
    ("loss", "is_sure"),
    [
        (lambda x: x.pow(2).mean(), True),
        (lambda x: (x.log() * MASK).sum(), True),
        (lambda x: x[MASK.bool()].pow(2).mean(), True),
        # A function of the script may skip tokens, and so may a mask below the summed values.
        (lambda x: Skips.apply(x).sum() / 3, False),
        (lambda x: (Skips.apply(x) * MASK).sum(), False),
        (lambda x: (x * MASK).pow(2).sum() / 3, False),
    ],
)
def test_entries_that_may_be_no_tokens_are_known(loss, is_sure):
    found = LossTerms(loss(torch.rand(2, 3, requires_grad=True).exp()).grad_fn, {}, {}, 2)
    assert [level["sure"] for term in found.terms for level in term.levels] == [is_sure]


def test_tokens_of_several_documents_in_a_row_are_no_sample():
    row, places = torch.zeros(1, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert samples_in(nn.Identity(), (row,), {}) == 1
    assert samples_in(nn.Identity(), (row,), {"position_ids": places}) == NOT_ROWS
    assert samples_in(nn.Identity(), (row,), {"cu_seqlens": places}) == NOT_ROWS


@pytest.mark.parametrize(("batch_first", "samples"), [(True, 5), (False, None)])
def test_steps_of_time_are_no_samples(batch_first, samples):
    inputs = torch.zeros(5, 3, 2)
    known = samples_in(nn.Sequential(nn.GRU(2, 2, batch_first=batch_first)), (inputs,), {})
    assert rows_among(torch.zeros(5, 3), known) == samples
