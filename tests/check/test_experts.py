"""Routers of experts: mistakes in training and weighting are reported; right ones have no note."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from plumbline.check.judge.noted import HeadlineNote
from plumbline.replay.replay_modes import grouped_mm

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICRO_BATCHES, COEFFICIENT = 3, 4, 0.01


class Attached(torch.autograd.Function):
    """Passes a tensor on, and starts a loss's gradient in the backward, as in several MoE trainers."""

    scale = 1.0

    @staticmethod
    def forward(ctx, tensor, loss):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.tensor(Attached.scale)


class Experts(nn.Module):
    """Sends each token to the best of four experts, and computes a balancing loss."""

    def __init__(
        self, k=2, detached=False, counted_only=False, capacity=None, attach=None, jitter=None, bias=False, logged=False
    ):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.k, self.detached, self.counted_only, self.capacity = k, detached, counted_only, capacity
        self.attach, self.jitter, self.lost, self.tokens = attach, jitter, 0, 0
        self.register_buffer("bias", torch.zeros(4) if bias else None)
        self.logged = logged

    def forward(self, tokens):
        scores = self.gate(tokens if self.jitter is None else tokens * self.jitter(tokens)).softmax(-1)
        if self.bias is None:
            weights, chosen = scores.topk(self.k)
        else:
            with torch.set_grad_enabled(self.logged):
                chosen = torch.topk(scores + self.bias, self.k).indices
            weights = scores.gather(1, chosen)
        counts = functional.one_hot(chosen, 4).float().sum(1).mean(0)
        self.balance = counts.square().sum() if self.counted_only else 4 * (counts * scores.mean(0)).sum()
        self.balance = self.balance.detach() if self.logged else self.balance
        if self.bias is not None:
            self.bias -= 0.01 * (counts - counts.mean()).sign()
        if self.attach is not None:
            weights = self.attach(weights, COEFFICIENT * self.balance)
        weights = weights.detach() if self.detached else weights
        outputs, lost = torch.zeros_like(tokens), torch.ones(len(tokens), dtype=torch.bool)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            rows, places = rows[: self.capacity], places[: self.capacity]
            lost[rows] = False
            outputs = outputs.index_add(0, rows, weights[rows, places, None] * expert(tokens[rows]))
        self.lost, self.tokens = self.lost + int(lost.sum()), self.tokens + len(tokens)
        return outputs


class Net(nn.Module):
    def __init__(self, run=lambda block, x: block(x), **options):
        super().__init__()
        self.first, self.moe, self.head = nn.Linear(6, 8), Experts(**options), nn.Linear(8, 3)
        self.run = run

    def forward(self, inputs):
        tokens = self.first(inputs)
        return self.head(tokens + self.run(self.moe, tokens))


class Weighed(Attached):
    """Applies the coefficient itself, which the graph does not show."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.tensor(0.3 * COEFFICIENT / MICRO_BATCHES)


class Corrected(Experts):
    """Scores by sigmoids, and is balanced by a bias parameter, like DeepSeek."""

    def __init__(self):
        super().__init__()
        self.correction = nn.Parameter(torch.zeros(4))

    def forward(self, tokens):
        scores, self.balance = self.gate(tokens).sigmoid(), None
        chosen = (scores + self.correction).topk(2).indices
        counts = functional.one_hot(chosen, 4).float().sum((0, 1))
        self.correction.data -= 0.1 * (counts - counts.mean()).sign()
        weights = scores.gather(1, chosen)
        outputs = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            outputs = outputs.index_add(0, rows, weights[rows, places, None] * expert(tokens[rows]))
        return outputs


class Balancer:
    """Balances experts without being a module."""

    def __init__(self):
        self.bias = torch.zeros(4)

    def update(self, counts):
        self.bias += 0.1 * (counts.mean() - counts).sign()


class Balanced(Corrected):
    """Is balanced by another object's values."""

    def __init__(self):
        super().__init__()
        self.balancer = Balancer()

    def forward(self, tokens):
        self.correction.data[:] = self.balancer.bias
        self.balancer.update(self.gate(tokens).detach().argmax(-1).bincount(minlength=4).float())
        return super().forward(tokens)


class Codebook(nn.Module):
    """Replaces each token by the nearest code; codes are means of tokens, not trained by gradients."""

    def __init__(self):
        super().__init__()
        self.codes, self.balance = nn.Parameter(torch.randn(6, 8)), None

    def forward(self, tokens):
        with torch.no_grad():
            chosen = functional.one_hot((-torch.cdist(tokens, self.codes)).argmax(-1), 6).float()
            codes = chosen @ self.codes
            self.codes.data += 0.1 * (chosen.T @ (tokens - codes)) / chosen.sum(0).clamp(min=1).unsqueeze(1)
        return tokens + (codes - tokens).detach()


def attached(weights, loss):
    return Attached.apply(weights, loss)


def weighed(weights, loss):
    return Weighed.apply(weights, loss / COEFFICIENT)


def dropped(weights, loss):
    Attached.apply(weights, loss)
    return weights


def fit(make=Net, balanced=lambda main, balance: main / MICRO_BATCHES + COEFFICIENT * balance / MICRO_BATCHES, scale=1):
    torch.manual_seed(0)
    Attached.scale = scale
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            main = cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))
            balanced(main, model.moe.balance).backward()
        optimizer.step()


def main_only(main, _):
    return main / MICRO_BATCHES


@pytest.fixture
def notes(plumbline):
    """Return a function that trains, and returns the notes and those about experts."""

    def notes(train, ranks=1):
        checked = plumbline.check(train, ranks=ranks, steps=STEPS)
        checked.assert_right()
        return [one.message for one in checked.findings if isinstance(one, HeadlineNote) or one.check == "experts"]

    return notes


UNDIVIDED = f"counts {MICRO_BATCHES} × its coefficient in a step of {MICRO_BATCHES} micro-batches"

MISTAKES = {
    # NVIDIA-NeMo/Automodel#3359, huggingface/trl#6083
    "not divided by micro-batches": (partial(fit, balanced=lambda m, b: m / 4 + COEFFICIENT * b), UNDIVIDED),
    "divided twice": (partial(fit, balanced=lambda m, b: (m + COEFFICIENT * b / 4) / 4), "divided by 4 twice"),
    "added twice": (partial(fit, balanced=lambda m, b: (m + COEFFICIENT * b + COEFFICIENT * b) / 4), "added 2 times"),
    # NVIDIA-NeMo/Automodel#1412, its first and its second mistake
    "what it returns is dropped": (
        partial(fit, lambda: Net(attach=dropped), main_only),
        "A loss computed from router scores is passed to Attached, but the return value is not used",
    ),
    "attached without the main loss's factor": (partial(fit, lambda: Net(attach=attached), main_only), UNDIVIDED),
    "attached with another factor": (
        partial(fit, lambda: Net(attach=attached), main_only, 1 / 1024),
        "AttachedBackward attaches counts 0.00391 × its coefficient",
    ),
    "counts alone": (
        partial(fit, lambda: Net(counted_only=True)),
        "A constant is added to the loss: moe.balance has no gradient",
    ),
    # TIML-Group/Robust-MoE-Dual-Model#2
    "a router without a gradient": (
        partial(fit, lambda: Net(detached=True), main_only),
        "moe.gate selects experts by scores computed with moe.gate.weight, but no gradient reached it in 3 steps.",
    ),
    "a router that the main loss does not reach": (
        partial(fit, lambda: Net(detached=True)),
        "no gradient of the main loss reaches the scores of moe.gate: only",
    ),
}


@pytest.mark.parametrize(("train", "said"), MISTAKES.values(), ids=MISTAKES.keys())
@pytest.mark.skipif(
    not hasattr(torch.ones(1, requires_grad=True).sum().grad_fn, "_input_metadata"),
    reason="the nodes of this torch do not tell which of them compute a number",
)
def test_a_mistake_with_experts_is_told(notes, train, said):
    found = notes(train)
    assert any(said in one for one in found), found


def test_a_router_that_nothing_trains_is_not_said_to_be_balanced(notes):
    class Both(Net):
        def __init__(self):
            super().__init__()
            self.other = Experts(detached=True)

        def forward(self, inputs):
            tokens = self.first(inputs)
            return self.head(self.moe(tokens + self.other(tokens)))

    said = notes(partial(fit, Both))
    assert any("no gradient reached it" in one for one in said)
    assert not any("no gradient of the main loss" in one for one in said)


def test_a_weight_of_one_expert_that_is_divided_by_itself_leaves_no_gradient(notes):
    class Normed(Experts):
        def forward(self, tokens):
            scores = self.gate(tokens).softmax(-1)
            best = scores.max(-1).values
            self.balance = None
            return self.experts[0](tokens) * (best / best).unsqueeze(1) * (1 + 0 * scores.argmax(-1, keepdim=True))

    def make():
        model = Net()
        model.moe = Normed()
        return model

    (said,) = notes(partial(fit, make, main_only))
    assert "no gradient reached it" in said


def in_mixed_precision():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            main = cross_entropy(model(torch.randn(16, 6)), torch.randint(3, (16,)))
            scaler.scale((main + COEFFICIENT * model.moe.balance) / MICRO_BATCHES).backward()
        scaler.step(optimizer)
        scaler.update()


def in_parallel():
    torch.manual_seed(dist.get_rank())
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        main = cross_entropy(wrapped(torch.randn(16, 6)), torch.randint(3, (16,)))
        (main + COEFFICIENT * model.moe.balance).backward()
        optimizer.step()


class Other(Net):
    """A net with another module instead of experts."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe()


def adversaries():
    """The discriminator's backward comes between the generator's forward and backward."""
    torch.manual_seed(0)
    generator, discriminator = Net(attach=attached), nn.Sequential(nn.Linear(3, 6), Net())
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (generator, discriminator)]
    for _ in range(STEPS):
        made = generator(torch.randn(16, 6))
        (discriminator(made.detach()).mean() - discriminator(torch.randn(16, 3)).mean()).backward()
        optimizers[1].step()
        (-discriminator(made).mean()).backward()
        optimizers[0].step()
        for one in optimizers:
            one.zero_grad()


class Accuracy(Net):
    """Selects classes in its forward, but has no experts to balance: the outputs are used for the main loss."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.best = outputs.topk(2).indices
        return outputs


RIGHT = {
    "divided alike": partial(fit),
    "divided together": partial(fit, balanced=lambda m, b: (m + COEFFICIENT * b) / MICRO_BATCHES),
    "without a balancing loss": partial(fit, balanced=main_only),
    "attached with the main loss's factor": partial(fit, lambda: Net(attach=attached), main_only, 1 / MICRO_BATCHES),
    "balanced by a bias": partial(fit, lambda: Net(bias=True), main_only),
    "noise that the checkpoint repeats": partial(
        fit, lambda: Net(lambda b, x: checkpoint(b, x, use_reentrant=False), jitter=torch.rand_like), main_only
    ),
    "mixed precision": in_mixed_precision,
    "added to a number": partial(fit, balanced=lambda m, b: sum([main_only(m, b)])),
    "classes selected": partial(fit, Accuracy),
    "balanced by a bias that is a parameter": partial(fit, lambda: Other(Corrected), main_only),
    "codes that are means": partial(fit, lambda: Other(Codebook), main_only),
    "attached by a function with a coefficient": partial(fit, lambda: Net(attach=weighed), main_only),
    "attached in a generator": adversaries,
    "balanced by a bias and logged": partial(
        fit, lambda: Net(bias=True, logged=True), lambda m, b: sum([main_only(m, b)])
    ),
    "a mean of all token losses by hand": partial(fit, balanced=lambda m, b: (m + COEFFICIENT * b).mean() / 4),
}


@pytest.mark.parametrize("train", RIGHT.values(), ids=RIGHT.keys())
def test_right_experts_have_no_note(notes, train):
    assert notes(train) == []


@pytest.mark.parametrize("module", [Corrected, Balanced])
def test_a_bias_that_a_forward_changes_is_not_changed_by_its_replays(plumbline, module):
    made = []

    def train():
        fit(lambda: made.append(Other(module)) or made[-1], main_only)
        return made[-1].moe.correction.tolist()

    assert plumbline.check(train, ranks=1, steps=STEPS).values == [train()]


class Grouped(nn.Module):
    """Multiplies all experts' tokens at once, in a kernel without float64 support, like transformers' experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.balance = nn.Linear(8, 4), None
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 4), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, tokens):
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        order, ends = chosen.argsort(), torch.bincount(chosen, minlength=4).cumsum(0).int()
        inner = torch._grouped_mm(tokens[order], self.up, offs=ends).tanh()
        outputs = torch._grouped_mm(inner, self.down, offs=ends)
        return weights[:, None] * torch.zeros_like(tokens).index_copy(0, order, outputs)


has_grouped_products = pytest.mark.skipif(
    not hasattr(functional, "grouped_mm"), reason="torch 2.10 is the first to have grouped products on all devices"
)


@has_grouped_products
def test_experts_of_grouped_products_are_computed_again(plumbline):
    checked = plumbline.check(partial(fit, lambda: Other(Grouped), main_only), ranks=1, steps=STEPS)
    checked.assert_right(require_full=True)


GROUPS = [(2, 3), (3, 2), (2, 2), (3, 3)]


@has_grouped_products
@pytest.mark.parametrize("dimensions", GROUPS, ids=str)
def test_grouped_products_are_those_of_the_kernel(dimensions):
    shapes = {(2, 3): ((12, 16), (3, 16, 8)), (3, 2): ((3, 8, 16), (16, 12)), (2, 2): ((8, 12), (12, 16))}
    one, other = (torch.randn(shape) for shape in shapes.get(dimensions, ((3, 4, 16), (3, 16, 8))))
    ends = torch.tensor([4, 4, 12], dtype=torch.int32) if dimensions != (3, 3) else None
    expected = torch._grouped_mm(one, other, offs=ends)
    torch.testing.assert_close(grouped_mm(one.double(), other.double(), ends).float(), expected)


def test_a_loss_that_only_some_micro_batches_add_is_told(plumbline):
    numbers = count()

    def in_every_second(main, balance):
        return (main + (COEFFICIENT * balance if next(numbers) % 2 else 0.0)) / MICRO_BATCHES

    checked = plumbline.check(partial(fit, balanced=in_every_second), ranks=1, steps=STEPS)
    messages = [one.message for one in checked.findings if one.check == "objective"]
    passes = MICRO_BATCHES * STEPS
    assert f"{passes // 2} of {passes} backward passes add a sum that the script computes to the loss" in messages[-1]
    assert not any(message.startswith("The loss is the mean") for message in messages)


def test_right_experts_on_two_ranks_have_no_note(notes):
    assert notes(in_parallel, ranks=2) == []


def test_tokens_that_no_expert_receives_are_counted(notes):
    made = []
    fit(lambda: made.append(Net(capacity=3)) or made[0])
    (said,) = notes(partial(fit, lambda: Net(capacity=3)))
    assert said.startswith(f"{made[0].moe.lost} of {made[0].moe.tokens} tokens (")
    assert said.endswith("reach no expert of moe.gate, or are masked: the module around it returns zeros for them.")


def test_experts_that_a_recomputation_chooses_anew_are_named(plumbline):
    """NVIDIA-NeMo/Automodel#3140: the recomputation routes differently from the forward."""

    class Jitter(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, tokens):
            return 1 + 2 * torch.rand(tokens.shape, generator=self.generator)

    def run(block, tokens):
        return checkpoint(block, tokens, use_reentrant=True)

    checked = plumbline.check(partial(fit, lambda: Net(run, jitter=Jitter()), main_only), ranks=1, steps=STEPS)
    (found,) = [one for one in checked.findings if one.outcome.is_bad]
    assert (found.check, found.cause) == ("recomputation", "experts-chosen-anew-in-the-backward")
    assert "of 16 tokens to different experts" in found.message


class Synchronised(Experts):
    """Counts the tokens of all ranks, like a balancing loss over a global batch, and stores the loss."""

    def forward(self, tokens):
        outputs = super().forward(tokens)
        scores = self.gate(tokens).softmax(-1)
        counts = functional.one_hot(scores.argmax(-1), 4).float().mean(0)
        dist.all_reduce(counts)
        self.balance = 4 * (counts / 2 * scores.mean(0)).sum()
        return outputs


def balanced_over_ranks():
    torch.manual_seed(0)
    model = Other(Synchronised)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        main = cross_entropy(wrapped(torch.randn(16, 6)), torch.randint(3, (16,)))
        (main + model.moe.balance).backward()
        optimizer.step()


def test_a_loss_that_a_module_holds_is_not_judged_by_what_it_returns(plumbline):
    checked = plumbline.check(balanced_over_ranks, ranks=2, steps=STEPS)
    checked.assert_right()
    (left_out,) = checked.trainings[0].coverage.gradients.left_out
    assert {"moe.gate.weight", "first.weight", "first.bias"} == set(left_out.names)
    assert "a loss that a module stores but does not return" in left_out.why


class Part(nn.Module):
    """Each rank sends its own part of the tokens to experts, as in sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.experts = Experts()

    def forward(self, tokens):
        half, first = len(tokens) // 2, dist.get_rank() * len(tokens) // 2
        outputs = self.experts(tokens[first : first + half])
        return torch.cat([torch.zeros(first, 8), outputs, torch.zeros(half - first, 8)])


def the_same_samples(seed, make=lambda: Net(jitter=torch.rand_like)):
    """Both ranks have the same tokens, like a tensor-parallel group, but draw different noise."""
    model, groups = make(), [dist.new_group([rank]) for rank in range(2)]
    for one in model.parameters():
        dist.broadcast(one.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = torch.Generator().manual_seed(5)
    torch.manual_seed(seed())
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(16, 6, generator=batches)
        cross_entropy(model(inputs), torch.zeros(16, dtype=torch.long)).backward()
        for one in model.parameters():
            dist.all_reduce(one.grad, group=groups[dist.get_rank()])
        optimizer.step()


def test_ranks_that_send_the_same_tokens_to_other_experts_are_named(plumbline):
    checked = plumbline.check(partial(the_same_samples, lambda: dist.get_rank()), ranks=2, steps=STEPS)
    assert any("All ranks are given the same samples, but moe.gate sends" in one.message for one in checked.findings)
    for right in (partial(the_same_samples, lambda: 0), partial(the_same_samples, lambda: 0, lambda: Other(Part))):
        checked = plumbline.check(right, ranks=2, steps=STEPS)
        assert not any(isinstance(one, HeadlineNote) and one.check == "experts" for one in checked.findings)
