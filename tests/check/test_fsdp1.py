"""FullyShardedDataParallel (FSDP1) on real ranks: right trainings are judged in full, and mistakes are named."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

from plumbline.check.rank.joint.steps import FLAT
from plumbline.check.verdict.verdict import Answer, answer_of, sentence_on
from plumbline.ranks.run import run_on_ranks
from plumbline.recording.flat_sharding import flat_units

STEPS = 3
BF16 = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
REDUCED_IN_FLOAT32 = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
FP16 = MixedPrecision(torch.float16, torch.float16, torch.float16)
NO_SHARD = ShardingStrategy.NO_SHARD


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, hidden):
        return self.norm(hidden + self.dropout(self.narrow(torch.relu(self.wide(hidden)))))


class Model(nn.Module):
    def __init__(self, *, tied=False, norm=False, recurrent=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(8) if norm else None
        self.recurrent = nn.GRU(8, 8, batch_first=True) if recurrent else None
        self.head = nn.Linear(8, 11, bias=False)
        self.register_buffer("scale", torch.full((8,), 1.1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        if self.recurrent is not None:
            hidden, _ = self.recurrent(hidden)
        if self.norm is not None:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(hidden)


def sharded(model=None, *, flat=False, strategy=ShardingStrategy.FULL_SHARD, mixed=None):
    if model is None:
        torch.manual_seed(0)
        model = Model()
    options = {}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=strategy,
            use_orig_params=not flat,
            mixed_precision=mixed,
            device_id=torch.device("cpu"),
            **options,
        )


def loss_of(model):
    tokens, targets = torch.randint(11, (4, 5)), torch.randint(11, (4, 5))
    return cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def backward(model, micro_batches=1):
    for _ in range(micro_batches):
        (loss_of(model) / micro_batches).backward()


def backward_with_no_sync(model, micro_batches=2):
    with model.no_sync():
        backward(model, micro_batches - 1)
    backward(model)


def train(model, backward=backward, finish=lambda model: None, optimizer=None, seed=None):
    """Return the sums of all weights that the rank holds after the training."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model)
        finish(model)
        optimizer.step()
    return [parameter.detach().sum().item() for parameter in model.parameters()]


def clip(model):
    model.clip_grad_norm_(0.1)


def accumulated(flat):
    return train(sharded(flat=flat), functools.partial(backward, micro_batches=2))


def accumulated_with_no_sync_and_clipped(flat):
    return train(sharded(flat=flat), backward_with_no_sync, clip)


def with_momentum(flat):
    model = sharded(flat=flat)
    return train(model, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def gradients_are_sharded(flat):
    return train(sharded(flat=flat, strategy=ShardingStrategy.SHARD_GRAD_OP), backward_with_no_sync)


def nothing_is_sharded(flat):
    return train(sharded(flat=flat, strategy=NO_SHARD), backward_with_no_sync, clip)


def in_bfloat16(flat):
    return train(sharded(Model(norm=True), flat=flat, mixed=BF16), backward_with_no_sync, clip)


def reduced_in_float32(flat):
    return train(sharded(flat=flat, mixed=REDUCED_IN_FLOAT32), backward_with_no_sync)


def in_float16(flat):
    return train(sharded(flat=flat, mixed=FP16))


def tied_and_recurrent(flat):
    torch.manual_seed(0)
    return train(sharded(Model(tied=True, recurrent=True), flat=flat))


def checkpointed(flat):
    model = sharded(flat=flat)
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda one: isinstance(one, Block))
    return train(model)


def evaluate(model):
    model.eval()
    with torch.no_grad():
        loss_of(model)
    model.train()


def evaluated_and_saved_between_steps(flat):
    def after_an_evaluation(model):
        evaluate(model)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            model.state_dict()
        backward(model)

    return train(sharded(flat=flat), after_an_evaluation)


KINDS = [
    accumulated,
    accumulated_with_no_sync_and_clipped,
    with_momentum,
    gradients_are_sharded,
    nothing_is_sharded,
    in_bfloat16,
    reduced_in_float32,
    in_float16,
    tied_and_recurrent,
    checkpointed,
    evaluated_and_saved_between_steps,
]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "use_orig_params"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.__name__)
def test_a_right_training_is_judged_in_full(plumbline, kind, flat):
    checked = plumbline.check(functools.partial(kind, flat), ranks=2, steps=STEPS)
    checked.assert_right(require_full=True)
    coverage = checked.trainings[0].coverage
    assert min(coverage.gradients.part, coverage.updates.part, coverage.replays.part) >= 0.95


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "use_orig_params"])
def test_replicas_of_shards_are_judged(plumbline, flat):
    def hybrid():
        return train(sharded(flat=flat, strategy=ShardingStrategy.HYBRID_SHARD), backward_with_no_sync, clip)

    plumbline.check(hybrid, ranks=4, steps=STEPS).assert_right(require_full=True)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "use_orig_params"])
def test_a_checked_training_computes_the_same_bit_for_bit(plumbline, flat):
    training = functools.partial(accumulated_with_no_sync_and_clipped, flat)
    alone = [end.value for end in run_on_ranks(lambda _: training(), 2, timeout=120)]
    assert plumbline.check(training, ranks=2, steps=STEPS).values == alone


def test_frozen_parameters_and_other_models_are_no_obstacle(plumbline):
    def two_models():
        torch.manual_seed(0)
        frozen, other = Model(), sharded(flat=True)
        for name, parameter in frozen.named_parameters():
            parameter.requires_grad_("narrow" in name or "head" in name)
        frozen = sharded(frozen)
        trained = [parameter for parameter in frozen.parameters() if parameter.requires_grad]
        optimizers = [torch.optim.AdamW(trained, 0.01), torch.optim.AdamW(other.parameters(), 0.01)]
        torch.manual_seed(dist.get_rank())
        for _ in range(STEPS):
            for model, optimizer in zip((frozen, other), optimizers, strict=True):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()

    plumbline.check(two_models, ranks=2, steps=STEPS).assert_right(require_full=True)


def test_models_on_some_of_the_ranks_are_not_judged(plumbline):
    def halves():
        group = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
        model = FullyShardedDataParallel(nn.Linear(6, 3), process_group=group, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            model.clip_grad_norm_(0.1)
            optimizer.step()

    checked = plumbline.check(halves, ranks=2, steps=STEPS)
    with pytest.raises(AssertionError, match="FSDP1 shards DTensors, or shards a model over some of the ranks only"):
        checked.assert_right()
    assert answer_of(checked.trainings[0]) is Answer.NOT_JUDGED


class SummedOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Centred(nn.Module):
    def __init__(self, *, communicates):
        super().__init__()
        self.inner = Model()
        self.communicates = communicates

    def forward(self, tokens):
        hidden = self.inner(tokens)
        mean = hidden.mean(dim=(0, 1))
        return hidden - (SummedOverRanks.apply(mean) / dist.get_world_size() if self.communicates else mean)


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "use_orig_params"])
def test_only_the_reduction_is_judged_if_the_forward_communicates(plumbline, flat):
    def centred(*, communicates):
        torch.manual_seed(0)
        return train(sharded(Centred(communicates=communicates), flat=flat))

    plumbline.check(functools.partial(centred, communicates=False), ranks=2, steps=STEPS).assert_right(
        require_full=True
    )
    (training,) = plumbline.check(functools.partial(centred, communicates=True), ranks=2, steps=STEPS).trainings
    assert answer_of(training) is Answer.NOT_JUDGED
    why = f"only the reduction was judged: {FLAT}"
    assert sentence_on(training) == f"no gradient was judged in full: {why}"
    assert [one.why for one in training.coverage.gradients.left_out] == [why]


def test_an_optimizer_of_original_parameters_may_be_made_before_they_are_wrapped(plumbline):
    def before():
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        train(sharded(model), optimizer=optimizer)

    plumbline.check(before, ranks=2, steps=STEPS).assert_right(require_full=True)


def first_line(plumbline, training):
    checked = plumbline.check(training, ranks=2, steps=STEPS)
    assert answer_of(checked.trainings[0]) is Answer.WRONG
    return next(finding for finding in checked.findings if finding.outcome.is_bad)


def clipped_by_torch_nn_utils(flat):
    train(sharded(flat=flat), finish=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)


def clipped_on_one_rank(flat):
    def finish(model):
        if dist.get_rank() == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(sharded(flat=flat), finish=finish)


def multiplied_on_one_rank(flat):
    def finish(model):
        for parameter in model.parameters():
            if dist.get_rank() == 1 and parameter.grad is not None:
                parameter.grad *= 3

    train(sharded(flat=flat), finish=finish)


def last_micro_batch_with_no_sync(flat):
    def backward_without_sync_at_the_end(model):
        backward(model)
        with model.no_sync():
            backward(model)

    train(sharded(flat=flat, strategy=NO_SHARD), backward_without_sync_at_the_end)


def never_synchronised(flat):
    def never(model):
        with model.no_sync():
            backward(model)

    train(sharded(flat=flat, strategy=NO_SHARD), never)


def never_divided(flat):
    model = sharded(flat=flat)
    for module in FullyShardedDataParallel.fsdp_modules(model):
        module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0
    train(model)


def divided_twice(flat):
    model = sharded(flat=flat)
    for module in FullyShardedDataParallel.fsdp_modules(model):
        module._gradient_predivide_factor = module._gradient_postdivide_factor = float(dist.get_world_size())
    train(model)


def the_same_rows_on_all_ranks(flat):
    train(sharded(flat=flat), seed=0)


def not_zeroed(flat):
    model = sharded(flat=flat)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    optimizer.zero_grad = lambda: None
    train(model, optimizer=optimizer)


def lacking_on_one_rank(flat):
    model = sharded(flat=flat)
    names = [name for name, _ in model.named_parameters() if dist.get_rank() == 0 or "blocks.1" not in name]
    named = dict(model.named_parameters())
    train(model, optimizer=torch.optim.AdamW([named[name] for name in names], 0.01))


def evaluated_before_the_step(flat):
    train(sharded(flat=flat), finish=evaluate)


def several_weights_at_the_start(flat):
    torch.manual_seed(dist.get_rank())
    train(sharded(Model(), flat=flat, strategy=NO_SHARD))


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "use_orig_params"])
@pytest.mark.parametrize(
    ("training", "cause"),
    [
        (clipped_by_torch_nn_utils, "clipped-shard-by-shard"),
        (clipped_on_one_rank, "clipped-shard-by-shard"),
        (multiplied_on_one_rank, "clipped-shard-by-shard"),
        (last_micro_batch_with_no_sync, "some-micro-batches-not-synchronised"),
        (never_synchronised, "not-synchronised"),
        (never_divided, "summed-over-ranks"),
        (divided_twice, "averaged-twice"),
        (the_same_rows_on_all_ranks, "no-sampler"),
        (not_zeroed, "previous-step-not-zeroed"),
        (lacking_on_one_rank, "missing-on-some-ranks"),
        (several_weights_at_the_start, "not-broadcast"),
        (evaluated_before_the_step, "stale-weights"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_mistake_is_named(plumbline, training, cause, flat):
    assert first_line(plumbline, functools.partial(training, flat)).cause == cause


def test_an_optimizer_that_holds_the_parameters_from_before_they_were_flattened_is_named(plumbline):
    def before():
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        train(sharded(model, flat=True), optimizer=optimizer)

    assert first_line(plumbline, before).cause == "optimizer-holds-other-parameters"


def test_a_parameter_in_no_optimizer_is_noted(plumbline):
    def forgotten():
        model = sharded()
        named = [parameter for name, parameter in model.named_parameters() if "head" not in name]
        train(model, optimizer=torch.optim.AdamW(named, 0.01))

    notes = [finding.message for finding in plumbline.check(forgotten, ranks=2, steps=STEPS).findings]
    assert any("in no optimizer" in note and "head.weight" in note for note in notes)


def test_fsdp1_computes_with_old_weights_after_a_forward_before_the_step():
    def losses(where):
        torch.manual_seed(0)
        model = sharded(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        found = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            for place in (lambda: model(torch.ones(2, 6)), optimizer.step)[:: 1 if where == "before" else -1]:
                with torch.no_grad():
                    place()
            found.append(loss.item())
        return found

    before, after = (
        next(iter(run_on_ranks(lambda _, where=where: losses(where), 2, timeout=60))).value
        for where in ("before", "after")
    )
    assert before[:2] == [after[0], after[0]]
    assert after[1] != after[0]


@pytest.mark.parametrize("flat", [True, False])
def test_gradients_that_were_never_reduced_are_each_ranks_own(flat):
    def gathered(_):
        model = FullyShardedDataParallel(nn.Linear(5, 3), device_id=torch.device("cpu"), use_orig_params=not flat)
        with model.no_sync():
            (model(torch.ones(2, 5)).sum() * (1 + dist.get_rank())).backward()
        (unit,) = flat_units(model)
        return torch.cat([one.reshape(-1) for one in unit.gathered(lambda one: one.grad)])[:15]

    for rank, found in enumerate(run_on_ranks(gathered, 2, timeout=60)):
        assert torch.equal(found.value, torch.full((15,), 2.0 * (1 + rank)))


class Transposed(nn.Module):
    """A weight with transposed strides, as in a channels_last model."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8).t())

    def forward(self, inputs):
        return inputs @ self.weight.t()


def train_transposed(strategy):
    torch.manual_seed(0)
    model = sharded(Transposed(), strategy=strategy)
    train(model, lambda model: model(torch.randn(4, 6)).square().mean().backward())


def test_parameters_with_strides_are_judged(plumbline):
    checked = plumbline.check(functools.partial(train_transposed, ShardingStrategy.FULL_SHARD), ranks=2, steps=STEPS)
    checked.assert_right(require_full=True)


def test_fsdp1_gives_weights_with_strides_the_gradients_of_others_where_nothing_is_sharded(plumbline):
    def gradients():
        torch.manual_seed(0)
        model, inputs = Transposed(), torch.randn(4, 6)
        model(inputs).square().mean().backward()
        right = model.weight.grad.clone()
        model.zero_grad()
        model = sharded(model, strategy=NO_SHARD)
        model(inputs).square().mean().backward()
        received = next(model.parameters()).grad
        return torch.allclose(received, right), torch.allclose(received.reshape(-1), right.t().reshape(-1))

    assert [end.value for end in run_on_ranks(lambda _: gradients(), 2, timeout=60)] == [(False, True)] * 2
    assert first_line(plumbline, functools.partial(train_transposed, NO_SHARD)).check == "gradients"
