"""Activation checkpoints whose recomputation differs from the forward are found; right ones are not accused."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from replaying import recording
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from plumbline.check.evidence.training import BackwardPass, Parameter, RecordedRank, RecordedStep, RecordedTraining
from plumbline.check.judge.recomputation import judge_recomputation
from plumbline.check.verdict.verdict import Answer, answer_of
from plumbline.core.outcome import Outcome
from plumbline.recording.pause import is_rehearsal
from plumbline.replay.checkpointing import without_checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2
KINDS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def dropping(p=0.5):
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(p), nn.Linear(8, 8))


def normalising():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.1 * torch.randn_like(gradient)


class Rounding(nn.Module):
    """A backward that is intended to differ from the forward, with random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return StraightThrough.apply(self.layer(x))


class Scaling(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(8, 8), draw

    def forward(self, x):
        return torch.tanh(self.layer(x)) * torch.tensor(0.5 + self.draw())


class ByHand(torch.autograd.Function):
    """A typical hand-written checkpoint."""

    @staticmethod
    def forward(ctx, block, preserves, x):
        ctx.block, ctx.preserves, ctx.state = block, preserves, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(enabled=ctx.preserves):
            if ctx.preserves:
                torch.set_rng_state(ctx.state)
            outputs = ctx.block(x)
        torch.autograd.backward(outputs, gradient)
        return None, None, x.grad


def by_hand(block, x, *, preserves):
    return ByHand.apply(block, preserves, x)


class Jittering(nn.Module):
    """Draws from its own generator, like routers of experts."""

    def __init__(self):
        super().__init__()
        self.layer, self.generator = nn.Linear(8, 8), torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.layer(x) * torch.rand(x.shape, generator=self.generator)


class Net(nn.Module):
    def __init__(self, block=dropping, run=None, **options):
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*(block() for _ in range(4)))
        self.run = run or self.checkpointed
        self.options = {"use_reentrant": False, **options}

    def checkpointed(self, block, x):
        return checkpoint(block, x, **self.options)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class InSegments(Net):
    def forward(self, x):
        return self.head(checkpoint_sequential(self.blocks, 2, self.first(x), **self.options))


def nested(inner, outer):
    """Return nested checkpoints: two blocks in each of two."""

    def pair():
        return Net(run=lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=inner)).blocks

    def run(blocks, x):
        def both(x):
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=inner)
            return x

        return checkpoint(both, x, use_reentrant=False, preserve_rng_state=outer)

    return Net(pair, run)


def seeded(block, x):
    def own(x):
        torch.manual_seed(5)
        return block(x)

    return checkpoint(own, x, use_reentrant=False, preserve_rng_state=False)


def train(make, *, before_backward=None, autocast=None, accumulate=1, hook=None, passes=1):
    torch.manual_seed(0)
    model = make()
    if hook is not None:
        for parameter in model.parameters():
            parameter.register_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=autocast is torch.float16)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                outputs = model(torch.randn(16, 6))
            loss = cross_entropy(outputs.float(), torch.randint(3, (16,))) / accumulate
            if before_backward is not None:
                before_backward(model)
            for again in range(passes - 1, -1, -1):
                scaler.scale(loss).backward(retain_graph=again > 0)
            model.train()
        scaler.step(optimizer)
        scaler.update()


def found(plumbline, training):
    """Return the check, and its finding about recomputations, or None."""
    checked = plumbline.check(training, ranks=1, steps=STEPS)
    assert not checked.ends[0].has_failed, checked.ends[0].stderr
    return checked, next((one for one in checked.findings if one.check == "recomputation"), None)


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

RIGHT = {
    "dropout": partial(train, Net),
    "bfloat16": partial(train, Net, autocast=torch.bfloat16),
    "float16 with a scaler": partial(train, lambda: Net(use_reentrant=True), autocast=torch.float16),
    "nothing random": partial(train, lambda: Net(partial(dropping, 0.0), preserve_rng_state=False)),
    "a state of its own": partial(train, lambda: Net(run=seeded)),
    "batch norm": partial(train, lambda: Net(normalising)),
    "selective": partial(train, lambda: Net(context_fn=SELECTIVE)),
    "segments": partial(train, lambda: InSegments(use_reentrant=True), accumulate=2),
    "nested": partial(train, lambda: nested(True, True)),
    "a backward of its own": partial(train, lambda: Net(Rounding, preserve_rng_state=False)),
    "hooks on parameters": partial(train, Net, hook=lambda gradient: 2 * gradient),
    "a graph used twice": partial(train, Net, passes=2),
}

REDRAWN = "masks-drawn-anew-in-the-backward"

WRONG = {
    "dropout": (REDRAWN, partial(train, lambda: Net(preserve_rng_state=False))),
    "reentrant": (REDRAWN, partial(train, lambda: Net(use_reentrant=True, preserve_rng_state=False))),
    "bfloat16": (REDRAWN, partial(train, lambda: Net(preserve_rng_state=False), autocast=torch.bfloat16)),
    "segments": (REDRAWN, partial(train, lambda: InSegments(preserve_rng_state=False), accumulate=2)),
    "the outer one of two": (REDRAWN, partial(train, lambda: nested(True, False))),
    "the inner one of two": (REDRAWN, partial(train, lambda: nested(False, True))),
    "selective": (REDRAWN, partial(train, lambda: Net(context_fn=SELECTIVE, preserve_rng_state=False))),
    "Python's generator": (REDRAWN, partial(train, lambda: Net(lambda: Scaling(random.random)))),
    "NumPy's generator": (REDRAWN, partial(train, lambda: Net(lambda: Scaling(np.random.rand), use_reentrant=True))),
    "another mode": (
        "recomputed-in-another-mode",
        partial(train, lambda: Net(use_reentrant=True), before_backward=lambda model: model.eval()),
    ),
    "by hand": (REDRAWN, partial(train, lambda: Net(run=partial(by_hand, preserves=False)))),
    "a generator of the script's": ("recomputed-differently", partial(train, lambda: Net(Jittering))),
    "what depends on the backward pass": (
        "recomputed-differently",
        partial(train, lambda: Net(lambda: Scaling(lambda: float(torch._C._current_graph_task_id() != -1)))),
    ),
}


@pytest.mark.parametrize("training", RIGHT.values(), ids=RIGHT.keys())
def test_a_right_checkpoint_is_not_accused(plumbline, training):
    checked, finding = found(plumbline, training)
    checked.assert_right()
    assert finding.outcome is Outcome.PASSED
    assert finding.message.endswith("recomputed the same values as the forward")
    assert checked.trainings[0].coverage.replays.part == 1


def test_masks_that_a_checkpoint_draws_anew_are_named_with_what_to_change(plumbline):
    checked, finding = found(plumbline, WRONG["dropout"][1])
    assert answer_of(checked.trainings[0]) is Answer.WRONG
    assert (finding.family, finding.cause) == ("rng", REDRAWN)
    assert "keep preserve_rng_state=True" in finding.message


@pytest.mark.parametrize(("cause", "training"), WRONG.values(), ids=WRONG.keys())
def test_a_checkpoint_that_recomputes_something_else_is_accused(plumbline, cause, training):
    checked, finding = found(plumbline, training)
    assert (finding.outcome, finding.cause) == (Outcome.FAILED, cause)
    assert (finding.step, finding.rank) == (0, 0)
    assert finding.error_x_noise > 10 * finding.limit_x_noise
    assert [one.check for one in checked.findings if one.outcome.is_bad] == ["recomputation"]


def test_a_checkpoint_by_hand_that_preserves_the_generator_is_right(plumbline):
    checked, finding = found(plumbline, partial(train, lambda: Net(run=partial(by_hand, preserves=True))))
    checked.assert_right()
    assert finding is None


def twice_by_hand(block, x):
    return by_hand(block, by_hand(block, x, preserves=False), preserves=False)


def by_hand_beside_noise(block, x):
    return by_hand(block, StraightThrough.apply(x), preserves=True)


@pytest.mark.parametrize("run", [twice_by_hand, by_hand_beside_noise])
def test_random_numbers_of_which_the_right_ones_are_unknown_are_not_judged(plumbline, run):
    checked, finding = found(plumbline, partial(train, lambda: Net(run=run)))
    assert finding.outcome is Outcome.SKIPPED
    (left_out,) = checked.trainings[0].coverage.replays.left_out
    assert "draws its own random numbers" in left_out.why
    assert answer_of(checked.trainings[0]) is Answer.NOT_JUDGED


def test_gradients_that_hooks_change_are_not_judged_where_a_checkpoint_is_wrong(plumbline):
    training = partial(train, lambda: Net(preserve_rng_state=False), hook=lambda gradient: 2 * gradient)
    checked, finding = found(plumbline, training)
    assert finding.outcome is Outcome.SKIPPED
    (left_out,) = checked.trainings[0].coverage.replays.left_out
    assert "hooks" in left_out.why
    assert answer_of(checked.trainings[0]) is Answer.NOT_JUDGED


class Penalised(nn.Module):
    """Stores a loss, and counts its forwards without replays."""

    def __init__(self):
        super().__init__()
        self.layer, self.penalty, self.forwards = nn.Linear(8, 8), None, []

    def forward(self, x):
        if not is_rehearsal():
            self.forwards.append(1)
        x = self.layer(x)
        self.penalty = (x.detach() * x).mean()
        return x


def penalised():
    torch.manual_seed(0)
    model = Net(Penalised)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))
        (loss + sum(block.penalty for block in model.blocks)).backward()
        optimizer.step()
    return len(model.blocks[0].forwards)


def test_reading_the_graph_of_a_loss_recomputes_no_checkpoint(plumbline):
    checked, _ = found(plumbline, penalised)
    assert checked.values == [penalised()]
    assert not [one.message for one in checked.findings if "no recorded backward pass uses" in one.message]


@KINDS
def test_a_replay_without_checkpoints_has_the_gradient_of_the_forward(reentrant):
    torch.manual_seed(0)
    model = Net(use_reentrant=reentrant, preserve_rng_state=False)
    inputs = torch.randn(16, 6)
    with recording() as recorded:
        torch.manual_seed(1)
        recorded.backward(model(inputs).square().mean())
        (one,) = recorded.exact(recomputed_otherwise=True).values()
    redrawn = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    model.run = lambda block, x: block(x)
    torch.manual_seed(1)
    model(inputs).square().mean().backward()

    for name, parameter in model.named_parameters():
        assert torch.equal(one.native[parameter], parameter.grad), name
        assert torch.allclose(one.gradients[parameter].float(), parameter.grad, rtol=1e-4, atol=1e-6), name
    assert not all(torch.equal(gradient, parameter.grad) for parameter, gradient in redrawn.items())


def test_checkpoints_are_as_they_were_after_a_replay_without_them():
    classes = torch.utils.checkpoint._checkpoint_hook, torch.utils.checkpoint.CheckpointFunction
    before = [dict(vars(one)) for one in classes]
    with pytest.raises(ValueError, match="stop"), without_checkpoints():
        raise ValueError("stop")
    assert [dict(vars(one)) for one in classes] == before


def judged(local, exact, native, **facts):
    noted = {
        "compared": 4,
        "different": 4,
        "generators": [],
        "modes": False,
        "compiled": False,
        "by_hand": False,
        **facts,
    }
    given = local, exact, native
    local, exact, native = (None if one is None else torch.tensor(one, dtype=torch.float64) for one in given)
    made = BackwardPass(0, local, exact, facts={"recomputation": noted}, native=native)
    parameters = Parameter("weight", (2,), "float32"), Parameter("bias", (1,), "float32")
    (finding,) = judge_recomputation(
        RecordedTraining((RecordedRank(0, 1, (RecordedStep(0, 0, parameters, local, (made,)),)),))
    )
    return finding


def test_values_that_differ_are_no_failure_while_the_gradient_is_that_of_the_forward():
    finding = judged([1.0, 1.0 + 2e-7, 0.5], [1.0, 1.0, 0.5], [1.0, 1.0 - 1e-7, 0.5])
    assert finding.outcome is Outcome.PASSED
    assert finding.error_x_noise == pytest.approx(2)


def test_the_parameter_that_is_furthest_off_is_named():
    finding = judged([1.0, 1.0, 0.6], [1.0, 1.0, 0.5], [1.0, 1.0 + 1e-7, 0.5])
    assert (finding.outcome, finding.parameter) == (Outcome.FAILED, "bias")
    assert "gradients are off by 6.67 %" in finding.message


def test_a_compiled_checkpoint_is_not_said_to_have_an_option_that_it_has_not():
    compiled = judged([1.0, 1.0, 0.6], [1.0, 1.0, 0.5], [1.0, 1.0 + 1e-7, 0.5], generators=["torch"], compiled=True)
    assert "use another backend" in compiled.message
    assert "preserve_rng_state" not in compiled.message


def test_a_gradient_where_the_forward_has_none_is_found():
    finding = judged([1.0, 1.0, 0.6], [1.0, 1.0, 0.0], [1.0, 1.0 + 1e-7, 0.0])
    assert (finding.outcome, finding.parameter) == (Outcome.FAILED, "bias")
    assert finding.error_x_noise == pytest.approx(6e6)


@pytest.mark.parametrize(("error", "outcome"), [(1e-6, Outcome.PASSED), (1e-2, Outcome.FAILED)])
def test_a_training_as_precise_as_its_replay_is_judged_by_half_of_the_digits(error, outcome):
    assert judged([1.0, 1.0, 0.5 + error], [1.0, 1.0, 0.5], [1.0, 1.0, 0.5]).outcome is outcome


@pytest.mark.parametrize(("exact", "native"), [(None, None), ([torch.nan] * 3, [torch.nan] * 3)])
def test_without_a_replay_nothing_is_judged(exact, native):
    finding = judged([1.0, 1.0, 0.6], exact, native)
    assert finding.outcome is Outcome.SKIPPED


def test_without_checkpoints_nothing_is_said():
    made = BackwardPass(0, torch.ones(3), torch.ones(3))
    step = RecordedStep(0, 0, (Parameter("weight", (3,), "float32"),), torch.ones(3), (made,))
    assert not list(judge_recomputation(RecordedTraining((RecordedRank(0, 1, (step,)),))))
