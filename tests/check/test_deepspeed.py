"""Trainings with DeepSpeed's engine: all ZeRO stages, whose optimizers step runs of float32 copies."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on
from plumbline.ranks.run import run_on_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed", reason="needs deepspeed: pip install deepspeed")
get_accelerator = deepspeed.accelerator.get_accelerator

STEPS, SIZE = 3, 8

SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
"""Release even the small weights of a test after each use."""


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 3))


class Training:
    """A right training; mistakes override its methods."""

    def __init__(self, zero, micro_batches=1, clip=0.0, bf16=False, fp16=False, groups=False, **settings):
        # On a CPU, the first process would otherwise compile a kernel.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo")
        type(get_accelerator()).is_fp16_supported = lambda self: True  # float16 works on a CPU, only slowly
        self.micro_batches = micro_batches
        self.dtype = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
        self.model = model()
        parameters = list(self.model.parameters())
        if groups:
            matrices = {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1}
            parameters = [matrices, {"params": [one for one in parameters if one.dim() == 1]}]
        self.engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=torch.optim.AdamW(parameters, lr=1e-3),
            config={
                "train_micro_batch_size_per_gpu": SIZE,
                "gradient_accumulation_steps": micro_batches,
                "gradient_clipping": clip,
                "zero_optimization": zero,
                "bf16": {"enabled": bf16},
                "fp16": {"enabled": fp16, "initial_scale_power": 12},
                "steps_per_print": 10**9,
                **settings,
            },
        )

    def fit(self):
        torch.manual_seed(100 + dist.get_rank())
        losses = []
        for number in range(STEPS * self.micro_batches):
            loss = self.loss()
            self.backward(loss, number)
            self.engine.step()
            losses.append(loss.item())
        return losses

    def loss(self):
        inputs = torch.randn(SIZE, 12)
        outputs = self.engine(inputs.to(self.dtype)).float()
        return functional.cross_entropy(outputs, inputs[:, :3].argmax(1))

    def backward(self, loss, number):
        self.engine.backward(loss)


class StaleLoad(Training):
    """Loads the model's state without the engine, which has its own copies."""

    def fit(self):
        torch.manual_seed(5)
        self.model.load_state_dict({name: torch.randn_like(one) / 4 for name, one in self.model.state_dict().items()})
        return super().fit()


class LossDividedToo(Training):
    """Divides the loss by the number of micro-batches, although the engine does."""

    def fit(self):
        inputs = torch.randn(SIZE * 40, 12, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, inputs[:, :3].argmax(1))
        self.loader = iter(DataLoader(data, batch_size=SIZE, sampler=DistributedSampler(data)))
        return super().fit()

    def loss(self):
        inputs, labels = next(self.loader)
        return functional.cross_entropy(self.engine(inputs), labels)

    def backward(self, loss, number):
        super().backward(loss / self.micro_batches, number)


class EarlyBoundary(Training):
    """Sets the boundary for the first micro-batch of a window instead of the last."""

    def backward(self, loss, number):
        self.engine.set_gradient_accumulation_boundary(number % self.micro_batches == 0)
        super().backward(loss, number)
        self.engine.set_gradient_accumulation_boundary((number + 1) % self.micro_batches == 0)


class NotReduced(Training):
    """Each rank takes its run from its own gradients."""

    def fit(self):
        self.engine.optimizer.average_tensor = lambda *args, **kwargs: None
        return super().fit()


class ChangedBeforeTheStep(Training):
    def fit(self):
        inner = self.engine.optimizer.optimizer
        step = inner.step

        def changed(*args, **kwargs):
            self.change([one for group in inner.param_groups for one in group["params"]])
            return step(*args, **kwargs)

        inner.step = changed
        return super().fit()


class Summed(ChangedBeforeTheStep):
    def change(self, masters):
        for one in masters:
            one.grad *= dist.get_world_size()


class StaleRun(ChangedBeforeTheStep):
    """Rank 1 steps with its run from the step before."""

    last = None

    def change(self, masters):
        (one,) = masters
        new = one.grad.clone()
        if dist.get_rank() == 1 and self.last is not None:
            one.grad = self.last
        self.last = new


class OwnNorm(Training):
    """Each rank clips by the norm of its own run."""

    def fit(self):
        zero = self.engine.optimizer
        zero.scaled_global_norm = lambda norm_type=2: torch.cat(
            [one.flatten() for one in zero.averaged_gradients[0]]
        ).norm()
        return super().fit()


class OfOwnHeads(nn.Module):
    def forward(self, query, key, value):
        heads = (one.transpose(1, 2) for one in (query, key, value))
        return functional.scaled_dot_product_attention(*heads).transpose(1, 2)


class OfOwnPositions(nn.Module):
    """Each rank has some positions of a sequence; in attention, some heads of all positions."""

    def __init__(self):
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        self.first, self.mixed, self.last = nn.Linear(12, 16), nn.Linear(16, 48), nn.Linear(16, 3)
        self.attention = DistributedAttention(OfOwnHeads(), dist.group.WORLD)

    def forward(self, values):
        values = self.first(values)
        parts = (one.unflatten(-1, (4, 4)) for one in self.mixed(values).chunk(3, -1))
        return self.last(values + self.attention(*parts, batch_dim_idx=0).flatten(2))


def layout_of_one_sequence(is_averaged):
    """Return the process groups that DeepSpeed queries if all ranks hold parts of one sequence.

    ZeRO 1 and 2 sum gradients over the ranks of a sequence. ZeRO 3 averages over the data-parallel group only.
    """
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    every = dist.group.WORLD
    groups = {
        "model": alone,
        "data": every if is_averaged else alone,
        "sequence": every,
        "sequence_data": every,
    }
    asked = {}
    for kind, group in groups.items():
        asked[f"get_{kind}_parallel_group"] = lambda group=group: group
        asked[f"get_{kind}_parallel_rank"] = partial(dist.get_rank, group)
        asked[f"get_{kind}_parallel_world_size"] = partial(dist.get_world_size, group)
    return SimpleNamespace(**asked)


class SequenceParallel(Training):
    """A rank's loss is the sum over its own positions, divided by the number of all positions."""

    def __init__(self, zero, is_mean=False):
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.init_distributed("gloo")
        torch.manual_seed(0)
        is_averaged = zero["stage"] == 3
        self.micro_batches, self.divisor = 1, 1 if is_averaged or is_mean else dist.get_world_size()
        module = OfOwnPositions()
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3),
            mpu=layout_of_one_sequence(is_averaged),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_clipping": 0.0,
                "zero_optimization": zero,
                "steps_per_print": 10**9,
            },
        )

    def loss(self):
        inputs = torch.randn(2, 6, 12)
        return functional.cross_entropy(self.engine(inputs).flatten(0, 1), inputs[..., :3].argmax(-1).flatten()) / (
            self.divisor
        )


WRONG = {
    "stale, stage 2": ("stale-master-weights", StaleLoad, {"stage": 2}, {}),
    "stale, stage 0 in bfloat16": ("stale-master-weights", StaleLoad, {"stage": 0}, {"bf16": True}),
    "divided twice, stage 2": ("divided-twice", LossDividedToo, {"stage": 2}, {"micro_batches": 4}),
    "divided twice, stage 3": ("divided-twice", LossDividedToo, SHARDED, {"micro_batches": 4}),
    "boundary, stage 1": ("last-micro-batches-missing", EarlyBoundary, {"stage": 1}, {"micro_batches": 2}),
    "not reduced, stage 2": ("not-synchronised", NotReduced, {"stage": 2}, {}),
    "summed, stage 1": ("summed-over-ranks", Summed, {"stage": 1}, {}),
    "summed, stage 3": ("summed-over-ranks", Summed, SHARDED, {}),
    "stale run, stage 2": ("one-step-late", StaleRun, {"stage": 2}, {}),
    "stale run, stage 3": ("one-step-late", StaleRun, SHARDED, {}),
    "loss not scaled, stage 0 in float16": ("loss-not-scaled", Training, {"stage": 0}, {"fp16": True}),
    "not reduced, stage 2 in float16": ("not-synchronised", NotReduced, {"stage": 2}, {"fp16": True}),
    "clipped before unscaling, stage 2 in autocast": (
        "clipped-before-unscaling",
        Training,
        {"stage": 2},
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "clip": 1.0},
    ),
    "sequences summed, stage 1": ("summed-over-ranks", SequenceParallel, {"stage": 1}, {"is_mean": True}),
    "own norm, stage 2": ("clipped-shard-by-shard", OwnNorm, {"stage": 2}, {"clip": 0.05}),
}

RIGHT = {
    "stage 0": ({"stage": 0}, {"micro_batches": 2}),
    "stage 0 in bfloat16": ({"stage": 0}, {"bf16": True, "clip": 0.05}),
    "stage 1": ({"stage": 1}, {"micro_batches": 2, "clip": 0.05, "groups": True}),
    "stage 1, accumulated in float32": (
        {"stage": 1}, {"bf16": True, "micro_batches": 2, "data_types": {"grad_accum_dtype": "fp32"}}),
    "stage 2": ({"stage": 2}, {"micro_batches": 2}),
    "stage 2, divided in another order": ({"stage": 2, "round_robin_gradients": True}, {"groups": True}),
    "stage 2 in bfloat16": ({"stage": 2}, {"bf16": True, "clip": 0.05}),
    "stage 2 in autocast, reduced in bfloat16": (
        {"stage": 2}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "stage 3": (SHARDED, {"micro_batches": 2, "clip": 0.05}),
    "stage 3, not released": ({"stage": 3}, {"groups": True}),
    "stage 3 in bfloat16": (SHARDED, {"bf16": True}),
    "stage 1 in float16": ({"stage": 1}, {"fp16": True, "clip": 0.05}),
    "stage 2 in float16": ({"stage": 2}, {"fp16": True, "micro_batches": 2}),
    "stage 3 in float16": (SHARDED, {"fp16": True, "clip": 10.0}),
}  # fmt: skip


@pytest.fixture
def judged(plumbline):
    """Return a function that trains on ranks under check, and returns the findings."""

    def judged(training, zero, ranks=2, **options):
        checked = plumbline.check(lambda: training(zero, **options).fit(), ranks=ranks, steps=STEPS)
        assert not any(end.has_failed for end in checked.ends), checked.ends
        (found,) = checked.trainings
        return found

    return judged


@pytest.mark.parametrize(("zero", "options"), RIGHT.values(), ids=RIGHT)
def test_every_stage_is_judged_in_full(judged, zero, options):
    training = judged(Training, zero, **options)
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2}, SHARDED], ids=["stage 1", "stage 2", "stage 3"])
def test_ranks_that_hold_parts_of_a_sequence_are_judged_together(judged, zero):
    training = judged(SequenceParallel, zero)
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)
    assert training.coverage.gradients.part > 0.95


@pytest.mark.parametrize(("cause", "training", "zero", "options"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_named(judged, cause, training, zero, options):
    found = judged(training, zero, **options)
    assert answer_of(found) is Answer.WRONG
    assert cause.replace("-", " ") in sentence_on(found)


@pytest.mark.parametrize("zero", [{"stage": 2}, SHARDED], ids=["stage 2", "stage 3"])
def test_three_ranks_are_judged_in_full(judged, zero):
    training = judged(Training, zero, ranks=3)
    assert answer_of(training) is Answer.RIGHT, sentence_on(training)


@pytest.mark.parametrize("zero", [{"stage": 2}, SHARDED], ids=["stage 2", "stage 3"])
def test_losses_are_the_same_bit_for_bit_without_check(plumbline, zero):
    def train():
        return Training(zero, micro_batches=2, clip=0.05).fit()

    plain = run_on_ranks(lambda terminal: train(), 2, timeout=100)
    assert [end.value for end in plain] == plumbline.check(train, ranks=2, steps=STEPS).values
