"""Which optimizer steps the recorder records, with which backward passes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from plumbline.check.judge.coverage import NO_STEP


class Raising(torch.optim.SGD):
    """Raises in its second step, before it changes any weight."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise MemoryError
        return super().step(closure)


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, lambda: nn.functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,)))


def steps_of(checked):
    (training,) = checked.trainings
    return training.training.ranks[0].steps


@pytest.mark.parametrize("again", [True, False], ids=["taken again", "left out"])
def test_steps_after_one_that_raised_are_recorded(plumbline, again):
    def train():
        model, loss = model_and_loss()
        optimizer = Raising(model.parameters(), 0.1)
        for _ in range(6):
            loss().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            try:
                optimizer.step()
            except MemoryError:
                if again:
                    optimizer.step()
            optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=4)
    checked.assert_right()
    assert [step.number for step in steps_of(checked)] == [0, 1, 2, 3]


def test_models_that_are_clipped_together_have_their_gradients_from_before(plumbline):
    def train():
        (first, loss), (second, other) = model_and_loss(), model_and_loss()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
        for _ in range(2):
            (loss() + other()).backward()
            nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=2)
    checked.assert_right()
    assert all(step.unclipped is not None for step in steps_of(checked))


def test_gradients_from_before_clipping_are_kept_while_another_model_computes_its_own(plumbline):
    def train():
        (first, loss), (second, other) = model_and_loss(), model_and_loss()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
        for _ in range(2):
            loss().backward()
            nn.utils.clip_grad_norm_(first.parameters(), 0.1)
            other().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=2)
    checked.assert_right(require_full=True)
    assert [step.unclipped is not None for step in steps_of(checked)] == [True, False, True, False]


def test_an_optimizer_whose_first_step_comes_too_late_is_not_covered(plumbline):
    def train():
        (critic, loss), (generator, other) = model_and_loss(), model_and_loss()
        often, seldom = (torch.optim.SGD(model.parameters(), 0.1) for model in (critic, generator))
        for number in range(1, 7):
            loss().backward()
            often.step()
            often.zero_grad()
            if number % 5 == 0:
                other().backward()
                seldom.step()
                seldom.zero_grad()

    checked = plumbline.check(train, ranks=1, steps=3)
    checked.assert_right()
    (training,) = checked.trainings
    for share in (training.coverage.gradients, training.coverage.updates, training.coverage.replays):
        (left_out,) = share.left_out
        assert left_out.why == NO_STEP
        assert share.part == 0.5
    with pytest.raises(AssertionError, match="right in part"):
        checked.assert_right(require_full=True)


@pytest.mark.parametrize("first", ["norm", "average"])
def test_clipping_by_the_norm_of_the_local_gradient_is_found(plumbline, first):
    def train():
        model, loss = model_and_loss()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            loss().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            if first == "norm":
                norm = nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= 2
            if first == "average":
                norm = nn.utils.get_total_norm(gradients)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
            optimizer.step()
            optimizer.zero_grad()

    checked = plumbline.check(train, ranks=2, steps=2)
    bad = {one.cause for one in checked.findings if one.check == "clipping" and one.outcome.is_bad}
    assert bad == ({"clipped-before-averaging"} if first == "norm" else set())
    if first == "average":
        checked.assert_right()


def test_hooks_that_the_script_registers_on_all_optimizers_run_when_recording_ends(plumbline):
    def train():
        model, loss = model_and_loss()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        register_optimizer_step_pre_hook(lambda *_: seen.append("before"))
        register_optimizer_step_post_hook(lambda *_: seen.append("after"))
        for _ in range(6):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert seen == ["before", "after"] * 6

    plumbline.check(train, ranks=1, steps=2).assert_right()
