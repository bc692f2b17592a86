"""Which calls are recorded, and the message if one cannot be rerun."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from replaying import Recording, assert_exact, recording
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plumbline.replay.uses import received_leaf

pytestmark = pytest.mark.usefixtures("one_thread")  # the models are tiny: more threads are slower


def reasons(recorded: Recording) -> set[str]:
    return set(recorded.total()[1].values())


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = torch.zeros(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module(*args, **kwargs)


def tracked(recorded: Recording) -> list[nn.Module]:
    return [call.module for call in recorded.calls.calls]


def test_the_outermost_module_is_recorded() -> None:
    body = Body()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        assert tracked(recorded) == [body]
        assert_exact(recorded, body)


def test_wrappers_are_looked_through() -> None:
    body = Body()
    model = Wrapper(Wrapper(body))
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 4)).sum())
        assert tracked(recorded) == [body]
        assert_exact(recorded, body)


def test_a_module_around_one_that_it_does_not_call_is_recorded_itself() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight.t(), self.inner.bias)

    model = Functional()
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 4)).sum())
        assert tracked(recorded) == [model]
        assert_exact(recorded, model)


def test_a_forward_that_is_replaced_for_good_is_recorded() -> None:
    class Scaled(nn.Linear):
        pass

    model = Scaled(4, 4)
    original = model.forward
    model.forward = lambda x: original(x).float()  # type: ignore[method-assign]
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 4)).sum())
        assert tracked(recorded) == [model]
        assert_exact(recorded, model)


def test_a_forward_that_is_redirected_for_one_call_is_looked_through() -> None:
    body = Body()
    outer = Wrapper(body)
    outer.extra = nn.Linear(4, 4)

    def training_step(x: Tensor) -> Tensor:
        del vars(outer)["forward"]
        return outer.extra(body(x)).sum()

    with recording() as recorded:
        outer.forward = training_step  # type: ignore[method-assign]
        recorded.backward(outer(torch.randn(2, 4)))
        assert tracked(recorded) == [body, outer.extra]
        assert_exact(recorded, outer)


def test_nothing_is_recorded_without_gradients_or_parameters() -> None:
    body = Body()
    with recording() as recorded:
        with torch.no_grad():
            body(torch.randn(2, 4))
        nn.Tanh()(torch.randn(2, 4, requires_grad=True))
        body.requires_grad_(False)
        body(torch.randn(2, 4, requires_grad=True))
        assert tracked(recorded) == []


def test_nothing_is_recorded_after_the_end_and_torch_is_as_it_was() -> None:
    before = nn.Module.__call__
    with recording() as recorded:
        assert nn.Module.__call__ is not before
    assert nn.Module.__call__ is before
    Body()(torch.randn(2, 4))
    assert tracked(recorded) == []


def test_accumulated_and_retained_backward_passes() -> None:
    body = Body()
    with recording() as recorded:
        for _ in range(2):
            out = body(torch.randn(2, 4))
            recorded.backward(out.sum(), retain_graph=True)
            recorded.backward(out.pow(2).sum())
        assert_exact(recorded, body)


def test_each_backward_pass_has_its_own_gradient() -> None:
    body = Body()
    with recording() as recorded:
        out = body(torch.randn(2, 4))
        recorded.backward(out.sum(), retain_graph=True)
        first = {one: one.grad.clone() for one in body.parameters()}
        recorded.backward(3 * out.sum())
        passes = recorded.exact()
    assert sorted(passes) == [0, 1]
    for parameter, gradient in first.items():
        assert torch.allclose(passes[0].gradients[parameter].float(), gradient, atol=1e-5)
        assert torch.allclose(passes[1].gradients[parameter], 3 * passes[0].gradients[parameter])


def test_a_generator_and_a_discriminator() -> None:
    generator, discriminator = Body(), Body()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (discriminator, generator)]
    with recording() as recorded:
        for _ in range(2):
            fake = generator(torch.randn(3, 4))
            optimizers[0].zero_grad()
            recorded.backward(discriminator(torch.randn(3, 4)).mean() - discriminator(fake.detach()).mean())
            assert_exact(recorded, discriminator)
            optimizers[0].step()
            optimizers[1].zero_grad()
            discriminator.zero_grad()
            recorded.backward(discriminator(fake).mean())
            passes = recorded.exact()
            (one,) = passes.values()
            assert not one.uncovered
            for parameter in generator.parameters():
                assert torch.allclose(one.gradients[parameter].float(), parameter.grad, atol=1e-6)
            optimizers[1].step()


def test_second_order_gradients_are_not_replayed() -> None:
    body = Body()
    x = torch.randn(2, 4, requires_grad=True)
    with recording() as recorded:
        out = body(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        recorded.backward(out.sum() + slope.pow(2).sum())
        gradients, uncovered = recorded.total()
    assert not gradients
    assert set(uncovered) == set(body.parameters())
    assert "second-order" in uncovered[body.first.bias]


def test_gradients_of_gradients_inside_the_forward_are_replayed() -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_()
            return torch.autograd.grad(self.body(x).sum() * self.scale, x, create_graph=True)[0]

    model = Energy()
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 4)).pow(2).sum())
        assert_exact(recorded, model)


def test_a_forward_that_raises_is_forgotten() -> None:
    class Raising(Body):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("no")

    body = Body()
    with recording() as recorded:
        with pytest.raises(ValueError, match="no"):
            Raising()(torch.randn(2, 4))
        recorded.backward(body(torch.randn(2, 4)).sum())
        assert tracked(recorded) == [body]
        assert_exact(recorded, body)


def test_calls_in_threads() -> None:
    bodies, x = [Body(), Body()], torch.randn(2, 4)
    with recording() as recorded:
        outputs: dict[int, Tensor] = {}

        def run(place: int) -> None:
            outputs[place] = bodies[place](x).sum()

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        recorded.backward(outputs[0] + outputs[1])
        gradients, uncovered = recorded.total()
    assert not uncovered
    assert len(gradients) == 8


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_outermost_module(reentrant: bool) -> None:
    first, second = Body(), Body()
    with recording() as recorded:
        h = checkpoint(first, torch.randn(2, 4, requires_grad=True), use_reentrant=reentrant)
        recorded.backward(second(h).sum())
        assert_exact(recorded, nn.ModuleList([first, second]))


def test_a_parameter_used_outside_of_any_module() -> None:
    body, scale = Body(), nn.Parameter(torch.ones(4))
    with recording() as recorded:
        recorded.backward((body(torch.randn(2, 4)) * scale).sum() + body.first.weight.pow(2).sum())
        gradients, uncovered = recorded.total()
    assert set(uncovered) == {scale, body.first.weight}
    assert set(gradients) == {body.first.bias, body.second.weight, body.second.bias}
    assert "outside" in uncovered[scale]


def test_a_gradient_that_leaves_a_call_by_an_attribute_is_not_claimed_to_be_known() -> None:
    class Leaking(Body):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = self.first.weight.pow(2).sum()
            return super().forward(x)

    body = Leaking()
    with recording() as recorded:
        out = body(torch.randn(2, 4))
        recorded.backward(out.sum() + body.penalty)
        gradients, uncovered = recorded.total()
    assert set(uncovered) == {body.first.weight}
    assert body.first.weight not in gradients


def test_a_parameter_of_another_module_is_said() -> None:
    other = nn.Linear(4, 4)

    class Borrowing(Body):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + other.weight.sum()

    body = Borrowing()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        before = other.weight.grad.clone()
        gradients, uncovered = recorded.total()
        assert torch.equal(before, other.weight.grad)
    assert set(uncovered) == {other.weight}
    assert len(gradients) == 4


def test_outputs_may_be_written_to() -> None:
    body = Body()
    with recording() as recorded:
        out = body(torch.randn(2, 4))
        out /= 2.0
        out[:, 0] = 0.0
        recorded.backward(out.pow(2).sum())
        assert_exact(recorded, body)


def test_inputs_may_be_written_to_later() -> None:
    body, x = Body(), torch.randn(2, 4)
    with recording() as recorded:
        loss = body(x + 0).sum() + body(x.clone()).sum()
        x.zero_()
        recorded.backward(loss)
        assert_exact(recorded, body)


def test_a_forward_with_a_memory_cannot_be_judged() -> None:
    class Counting(Body):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x) * Counting.calls

    body = Counting()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        (reason,) = reasons(recorded)
    assert "returned a different result when it was run again" in reason


def test_a_counter_on_the_module_is_put_back() -> None:
    class Counting(Body):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen, self.tensor = 0, [], torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x)
            self.tensor += 1
            self.new = 3
            return super().forward(x)

    body = Counting()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        assert_exact(recorded, body)
    assert (body.calls, len(body.seen), int(body.tensor)) == (1, 1, 1)


@pytest.mark.parametrize("through_data", [False, True], ids=["in-place", "through-data"])
@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_each_call_uses_the_values_that_the_forward_before_it_left(kind: str, *, through_data: bool) -> None:
    """A write through ``.data`` does not count as a new version of the tensor."""

    class Moving(Body):
        def __init__(self) -> None:
            super().__init__()
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(4))
            else:
                self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x) * self.scale.clone()
            with torch.no_grad():
                (self.scale.data if through_data else self.scale).mul_(2.0)
            return output

    body = Moving()
    body(torch.randn(2, 4))  # not recorded
    with recording() as recorded:
        for _ in range(3):
            recorded.backward(body(torch.randn(2, 4)).sum())
            if kind == "frozen" and not recorded.passes > 1:
                recorded.exact()  # the first call shows that the forward changes it
                body.zero_grad()
        assert_exact(recorded, body)
    assert body.scale.tolist() == [16.0] * 4


def test_a_sparse_buffer_is_recorded_in_each_call() -> None:
    class OnGraph(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.sparse.mm(self.edges, x))

    body = OnGraph()
    with recording() as recorded:
        for _ in range(2):
            recorded.backward(body(torch.randn(4, 4)).sum())
        assert_exact(recorded, body)


def test_a_call_that_cannot_be_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("no generators")

    monkeypatch.setattr("plumbline.replay.tracked_calls._generators", fails)
    body = Body()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        why = {reason for one in recorded.compute().values() for reason in one.uncovered.values()}
    assert why == {"a call of Body cannot be recorded: RuntimeError: no generators"}


def test_weights_that_changed_since_the_forward() -> None:
    body = Body()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        with torch.no_grad():
            body.first.weight.mul_(2)
        (reason,) = reasons(recorded)
    assert "changed" in reason


def test_weights_given_as_arguments() -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, own: Tensor, other: Tensor) -> Tensor:
            return x * self.scale * own + other

    model, other = Hyper(), nn.Parameter(torch.randn(4))
    with recording() as recorded:
        recorded.backward(model(torch.randn(2, 4), model.scale, other=other).sum())
        gradients, uncovered = recorded.total()
    assert set(uncovered) == {other}
    assert torch.allclose(gradients[model.scale].float(), model.scale.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_dropout(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.LayerNorm(64), nn.Dropout(0.3), nn.Linear(64, 8))
    with recording() as recorded:
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                out = model(torch.randn(16, 64))
            recorded.backward(out.float().pow(2).mean())
        gradients, uncovered = recorded.total()
    assert not uncovered
    for parameter in model.parameters():
        error = (gradients[parameter] - parameter.grad).norm() / gradients[parameter].norm()
        assert float(error) < 16 * torch.finfo(dtype).eps


def test_a_model_in_bfloat16_with_dropout() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.LayerNorm(64), nn.Linear(64, 8)).bfloat16()
    with recording() as recorded:
        recorded.backward(model(torch.randn(16, 64, dtype=torch.bfloat16)).pow(2).mean())
        gradients, uncovered = recorded.total()
    assert not uncovered
    for parameter in model.parameters():
        error = (gradients[parameter] - parameter.grad).norm() / gradients[parameter].norm()
        assert float(error) < 16 * torch.finfo(torch.bfloat16).eps


def test_a_generator_of_the_script_is_put_back() -> None:
    generator = torch.Generator().manual_seed(1)

    class Noisy(Body):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(4, generator=generator) * 0

    body = Noisy()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        before = generator.get_state()
        assert_exact(recorded, body)
    assert torch.equal(before, generator.get_state())


def test_lazily_initialised_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 4))
    with recording() as recorded:
        recorded.backward(model(torch.randn(5, 3)).pow(3).sum())
        assert_exact(recorded, model)


def test_what_a_forward_prints_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(Body):
        def forward(self, x: Tensor) -> Tensor:
            print("forward")
            return super().forward(x)

    body = Printing()
    with recording() as recorded:
        recorded.backward(body(torch.randn(2, 4)).sum())
        assert_exact(recorded, body)
    assert capsys.readouterr().out == "forward\n"


def test_memory_is_freed_with_the_graph() -> None:
    body = Body()
    with recording() as recorded:
        for _ in range(5):
            recorded.backward(body(torch.randn(2, 4)).sum())
            recorded.exact()
            body(torch.randn(2, 4))
            recorded.exact()
        assert len(recorded.calls.calls) == 0


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        (lambda leaf: leaf, True),
        (lambda leaf: leaf.clone(), True),
        (lambda leaf: leaf.clone().view(-1).double(), True),
        (lambda leaf: leaf + 1, False),
        (lambda leaf: nn.Linear(4, 4)(leaf.detach()), False),
        (lambda leaf: nn.Parameter(leaf.detach()).clone(), False),
    ],
    ids=["leaf", "clone", "cast", "sum", "module", "parameter"],
)
def test_a_leaf_and_a_copy_of_one_are_received_from_elsewhere(given: Any, is_one: bool) -> None:
    leaf = torch.randn(4, 4, requires_grad=True)
    assert (received_leaf(given(leaf)) is leaf) is is_one


def test_a_tensor_that_is_received_into_again_is_another_activation() -> None:
    model, received = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    kept = []
    with recording() as recorded:
        for weight in (1.0, 2.0):
            output = model(received)
            kept.append(output)  # like pipelines that keep the outputs of their last stage
            recorded.backward(weight * output.sum())
        first, second = (call.activations[0] for call in recorded.calls.calls)
    assert [*first.gradients] == [0]
    assert [*second.gradients] == [1]


class WritesIntoItsInput(nn.Module):
    """Returns its input dict, like sentence-transformers' modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        features["embedding"] = self.body.forward(features["x"])
        return features


def test_a_module_may_write_its_output_into_the_dict_that_it_is_given() -> None:
    model = WritesIntoItsInput()
    with recording() as recorded:
        recorded.backward(model({"x": torch.randn(2, 4)})["embedding"].square().sum())
        assert_exact(recorded, model)
