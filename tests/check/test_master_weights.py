"""Optimizers that step copies of the model's weights: whole, flat, and a run of the flat copy on each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from master_copies import Backwards, Flat, Mixed, NotCopiedBack, Sharded, VectorsLast, VectorsNotCopiedBack, Whole
from torch import nn
from torch.nn import functional

from plumbline.check.judge.clipped_masters import are_clipped
from plumbline.check.verdict.verdict import Answer, answer_of, notes_on, sentence_on
from plumbline.ranks.run import run_on_ranks

STEPS, SIZE = 3, 8


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def with_zeros(dtype):
    made = model(dtype)
    for one in made.parameters():
        if one.dim() == 1:
            nn.init.zeros_(one)
    return made


KINDS = {"whole": Whole, "flat": Flat, "sharded": Sharded, "backwards": Backwards}


class Training:
    """A right training; mistakes override its methods."""

    def __init__(self, kind=Sharded, dtype=torch.float32, micro_batches=1, limit=None, make=model, scale=1.0):
        self.micro_batches, self.limit, self.scale = micro_batches, limit, scale
        self.model = make(dtype)
        self.copies = kind(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.copies.masters, lr=1e-2)
        self.step = 0

    def fit(self):
        torch.manual_seed(100 + dist.get_rank())
        losses = []
        for self.step in range(STEPS):
            sums = [torch.zeros_like(one) for one in self.model.parameters()]
            for number in range(self.micro_batches):
                loss = self.loss()
                self.model.zero_grad()
                (loss * self.scale).backward()
                self.add(sums, number)
                losses.append(loss.item())
            with torch.no_grad():
                self.copies.give([self.averaged(one) for one in sums])
                self.clip()
                self.optimizer.step()
                self.copies.take()
        return losses

    def loss(self):
        inputs = torch.randn(SIZE, 6).to(next(self.model.parameters()).dtype)
        return functional.cross_entropy(self.model(inputs).float(), torch.randint(4, (SIZE,))) / self.micro_batches

    def add(self, sums, number):
        for total, one in zip(sums, self.model.parameters(), strict=True):
            total += one.grad

    def averaged(self, gradient):
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size() / self.scale

    def norm(self):
        square = sum(one.grad.square().sum() for one in self.copies.masters)
        if isinstance(self.copies, Sharded):
            dist.all_reduce(square)
        return square.sqrt()

    def clip(self):
        if self.limit is not None:
            factor = min(1.0, self.limit / float(self.norm()))
            for one in self.copies.masters:
                one.grad *= factor


class Summed(Training):
    def averaged(self, gradient):
        dist.all_reduce(gradient)
        return gradient


class DividedTwice(Training):
    def averaged(self, gradient):
        return super().averaged(gradient) / self.micro_batches


class NotReduced(Training):
    def averaged(self, gradient):
        return gradient / self.scale


class OwnLoss(Training):
    """A scaled loss that no torch function computes."""

    def loss(self):
        inputs = torch.randn(SIZE, 6)
        return (self.model(inputs).exp().sum(1).log() - self.model(inputs)[:, 0]).mean()


class NotScaled(Training):
    """Does not multiply the loss by the scale that gradients are divided by: DeepSpeed without ZeRO, #8393."""

    def averaged(self, gradient):
        return super().averaged(gradient) / 4096


class StaleLoad(Training):
    def fit(self):
        torch.manual_seed(5)
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(torch.randn_like(one) / 4)
        return super().fit()


class StaleRun(Training):
    """Rank 1 reads its run of the gradients before this step's reduction."""

    def clip(self):
        own = self.copies.masters[0]
        new = own.grad
        if dist.get_rank() == 1 and self.step:
            own.grad = self.late
        self.late = new.clone()


class OwnNorm(Training):
    def norm(self):
        return torch.stack([one.grad.norm() for one in self.copies.masters]).norm()


class LastMicroBatchMissing(Training):
    """Reads the gradients before the last micro-batch's backward."""

    def add(self, sums, number):
        if number < self.micro_batches - 1:
            super().add(sums, number)


class In16Bits(Training):
    def add(self, sums, number):
        for total, one in zip(sums, self.model.parameters(), strict=True):
            total.copy_((total + one.grad).bfloat16())


WRONG = {
    "stale-master-weights": (StaleLoad, {}),
    "summed-over-ranks": (Summed, {}),
    "divided-twice": (DividedTwice, {"micro_batches": 3}),
    "not-synchronised": (NotReduced, {}),
    "one-step-late": (StaleRun, {}),
    "clipped-shard-by-shard": (OwnNorm, {"limit": 0.05}),
    "last-micro-batches-missing": (LastMicroBatchMissing, {"micro_batches": 3}),
    "rounded-to-16-bits": (In16Bits, {"micro_batches": 3}),
    "loss-not-scaled": (NotScaled, {}),
}

WRONG_OF_A_SCALED_LOSS = {
    "divided-twice": (DividedTwice, {"micro_batches": 3, "scale": 1024.0}),
    "not-synchronised": (NotReduced, {"scale": 1024.0}),
    "clipped-shard-by-shard": (OwnNorm, {"limit": 0.05, "scale": 1024.0}),
}


@pytest.fixture
def judged(plumbline):
    """Return a function that trains on ranks under check, and returns the findings."""

    def judged(training, ranks=2, **options):
        checked = plumbline.check(lambda: training(**options).fit(), ranks=ranks, steps=STEPS)
        assert not any(end.has_failed for end in checked.ends), checked.ends
        (found,) = checked.trainings
        return found

    return judged


RIGHT = {
    "a bfloat16 model": {"dtype": torch.bfloat16},
    "accumulation and clipping": {"micro_batches": 2, "limit": 0.05},
    "a scaled loss": {"dtype": torch.float16, "scale": 1024.0},
    "a scaled loss and clipping": {"micro_batches": 2, "limit": 0.05, "scale": 1000.0},
}


@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_copies_of_every_kind_are_judged_in_full(judged, kind, options):
    training = judged(Training, kind=kind, **options)
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)


def test_runs_of_three_ranks_are_pieces_of_the_parameters_that_they_cut(judged):
    training = judged(Training, ranks=3)
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)
    held = [{one.name for one in rank.steps[0].parameters if one.is_held} for rank in training.training.ranks]
    assert "2.weight[41:194]" in held[1] - held[0] - held[2]
    assert training.coverage.gradients.of == sum(one.numel() for one in model().parameters())


@pytest.mark.parametrize(("cause", "kind", "options"), [(name, *what) for name, what in WRONG.items()], ids=WRONG)
def test_a_mistake_on_the_way_to_the_copies_is_named(judged, cause, kind, options):
    training = judged(kind, **options)
    assert answer_of(training) is Answer.WRONG
    assert cause.replace("-", " ") in sentence_on(training)


@pytest.mark.parametrize(
    ("cause", "kind", "options"),
    [(name, *what) for name, what in WRONG_OF_A_SCALED_LOSS.items()],
    ids=WRONG_OF_A_SCALED_LOSS,
)
def test_a_mistake_is_named_beside_a_scaler_of_the_trainer_s_own(judged, cause, kind, options):
    assert cause.replace("-", " ") in sentence_on(judged(kind, **options))


def test_a_scale_in_a_loss_that_is_not_followed_is_not_judged(judged):
    training = judged(OwnLoss, scale=1024.0)
    assert answer_of(training) is Answer.NOT_JUDGED
    assert "receive 1/1,024 of the gradient, as with a loss scale of 1,024" in sentence_on(training)


@pytest.mark.nightly
def test_a_script_with_copies_is_told_no_wrapper(judged):
    (found,) = [
        one for one in judged(NotReduced).findings if one.cause == "not-synchronised" and one.check == "gradients"
    ]
    assert "before they are copied to those that the optimizer holds" in found.message


def test_copies_that_are_stale_are_named_if_they_are_whole(judged):
    training = judged(StaleLoad, kind=Whole)
    assert "stale master weights" in sentence_on(training)
    (found,) = [one for one in training.findings if one.cause == "stale-master-weights"]
    assert (found.step, found.rank) == (0, 0)


def test_one_clipped_step_is_not_called_wrong(plumbline):
    checked = plumbline.check(lambda: Training(limit=0.05).fit(), steps=1)
    assert answer_of(checked.trainings[0]) is Answer.NOT_JUDGED


def test_losses_are_the_same_bit_for_bit_without_check(plumbline):
    def train():
        return Training(micro_batches=2).fit()

    plain = run_on_ranks(lambda terminal: train(), 2, timeout=60)
    assert [end.value for end in plain] == plumbline.check(train, ranks=2, steps=STEPS).values


def test_parameters_of_equal_values_are_told_apart_after_a_step(judged):
    training = judged(Training, kind=VectorsLast, make=with_zeros)
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)


def with_norms(dtype):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.RMSNorm(6)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(6, 4, bias=False)).to(dtype)


class SmallSteps(Training):
    """Weights of one do not change in bfloat16."""

    def __init__(self, **options):
        super().__init__(**options)
        self.optimizer = torch.optim.AdamW(self.copies.stepped, lr=1e-4)


def test_copies_of_parameters_of_equal_values_are_not_judged(judged):
    training = judged(SmallSteps, kind=Mixed, make=with_norms, dtype=torch.bfloat16)
    assert answer_of(training) is Answer.RIGHT_IN_PART, sentence_on(training)
    (left_out,) = training.coverage.gradients.left_out
    assert left_out.names == ("0.1.weight", "1.1.weight", "2.1.weight")
    assert not any("in no optimizer" in one.message for one in training.findings)


def test_a_model_to_which_nothing_is_copied_back_is_noted(judged):
    training = judged(Training, kind=NotCopiedBack)
    assert any("model's own weights do not change" in note for note in notes_on(training))


def test_weights_to_which_nothing_is_copied_back_are_named_beside_others(judged):
    training = judged(Training, kind=VectorsNotCopiedBack)
    (finding,) = [one for one in training.findings if one.outcome.is_bad]
    assert finding.cause == "masters-not-copied-back"


def test_norms_of_clipped_steps_agree_much_better_than_the_factors():
    assert are_clipped([0.1, 0.1000001, 0.1], [0.1387, 0.1388, 0.1397], within=1e-4)
    assert are_clipped([0.1, 0.1005], [0.5, 0.6])
    assert not are_clipped([0.1, 0.1005], [0.5, 0.5003], within=1e-4)  # the gradients are similar, and halved
    assert not are_clipped([0.1, 0.12], [0.5, 0.6])
    assert not are_clipped([0.1], [0.5])
