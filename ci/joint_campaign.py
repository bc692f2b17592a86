"""Checks random trainings whose ranks compute one forward together; some have a known mistake.

    .venv/bin/python ci/joint_campaign.py --minutes 20 --seed 1 --json campaign.json

Prints each right training that is accused and each mistake that is not, and a table by kind of parallelism.
Exits with 1 if a right training was accused, if a wrong one was called right, or if fewer of the caught mistakes
were named than ``--least-named`` says.
``--mistakes 0.25`` draws three right trainings for each wrong one. ``--only KIND`` and ``--number N`` run a part again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from plumbline.check.function import check_function
from plumbline.check.verdict.verdict import Answer, accusations, answer_of, sentence_on

WIDTH, HEADS, END, STEPS = 16, 4, 4, 4

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True)
class Spec:
    """One training: ``mistake`` is "" for a right one."""

    number: int
    kind: str
    ranks: int
    layers: int
    optimizer: str
    clip: float
    accumulate: int
    bfloat16: bool
    tied: bool
    frozen: bool
    zero_biases: bool
    rows: int
    schedule: str
    mistake: str


ANYWHERE = ("gradients-not-zeroed", "one-rank-not-reduced")

MISTAKES: dict[str, tuple[str, ...]] = {
    "tensor-parallel": ("gradients-not-zeroed",),
    "megatron": ("gradients-not-zeroed", "input-gradient-not-reduced", "counted-on-each-rank"),
    "megatron-sequence": (*ANYWHERE, "copies-not-reduced", "gathered-gradient-not-reduced"),
    "ring": (*ANYWHERE, "copies-not-reduced", "no-gradient-to-neighbours", "last-pass-not-reduced"),
    "ulysses": (*ANYWHERE, "copies-not-reduced", "exchanged-gradient-not-returned", "last-pass-not-reduced"),
    "experts": (*ANYWHERE, "copies-not-reduced", "experts-not-divided", "last-pass-not-reduced"),
    "gathered-loss": (*ANYWHERE, "copies-not-reduced", "gathered-gradient-not-reduced", "last-pass-not-reduced"),
    "pipeline-by-hand": ("gradients-not-zeroed", "gradient-sent-doubled", "last-gradient-not-sent"),
    "pipeline": ("gradients-not-zeroed",),
    "fsdp": ("gradients-not-zeroed",),
    "hsdp": ("gradients-not-zeroed",),
    "fsdp-tensor": ("gradients-not-zeroed",),
}  # fmt: skip
"""The mistakes for each kind of parallelism."""

EXCHANGES = frozenset(
    {"backward-wrong", "exchanged-otherwise", "some-tensors-scaled", "some-parameters-not-synchronised"}
)
"""Causes that name a wrong exchange."""

EXPECTED: dict[str, frozenset[str]] = {
    "gradients-not-zeroed": frozenset({"previous-step-not-zeroed", "gradients-not-zeroed"}),
    "one-rank-not-reduced": frozenset({"not-synchronised", "some-parameters-not-synchronised", "exchanged-otherwise",
        "ranks-differ", "rank-left-out"}),
    "copies-not-reduced": frozenset({"not-synchronised", "some-parameters-not-synchronised"}),
    "last-pass-not-reduced": frozenset({"some-micro-batches-not-synchronised", "last-micro-batch-only",
        "micro-batch-not-synchronised"}),
    "experts-not-divided": frozenset({"some-tensors-summed", "some-tensors-scaled"}),
    "input-gradient-not-reduced": EXCHANGES | {"parts-of-a-sum"},
}  # fmt: skip
"""The right causes for each mistake."""


def draw(number: int, seed: int, only: str | None, mistakes: float = 0.5) -> Spec:
    """Return training ``number``; ``mistakes`` is the probability of a mistake."""
    chance = random.Random(f"{seed} {number}")
    kind = only or chance.choice(sorted(MISTAKES))
    ranks = 4 if kind in ("hsdp", "fsdp-tensor") else chance.choice((2, 2, 2, 4))
    accumulate = 1 if kind == "pipeline" else chance.choice((1, 1, 2, 3))
    mistake = chance.choice(MISTAKES[kind]) if chance.random() < mistakes else ""
    return Spec(
        number, kind, ranks, chance.choice((1, 2)), chance.choice(sorted(OPTIMIZERS)), chance.choice((0.0, 0.0, 0.1)),
        max(accumulate, 2) if mistake == "last-pass-not-reduced" else accumulate, chance.random() < 0.2,
        chance.random() < 0.25, chance.random() < 0.25, chance.random() < 0.4, chance.choice((4, 8)),
        chance.choice(SCHEDULES), mistake,
    )  # fmt: skip


def exchange(forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an autograd function with one collective in the forward and another in the backward."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: Tensor) -> Tensor:
            return forth(values)

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return back(gradient)

    return Collective.apply


def same(values: Tensor) -> Tensor:
    return values.view_as(values)


def total(values: Tensor) -> Tensor:
    values = values.clone()
    dist.all_reduce(values)
    return values


def gathered(values: Tensor) -> Tensor:
    values = values.contiguous()
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return torch.cat(every)


def own_part(values: Tensor) -> Tensor:
    return values.chunk(dist.get_world_size())[dist.get_rank()].clone()


def scattered(values: Tensor) -> Tensor:
    return own_part(total(values))


def turned(values: Tensor) -> Tensor:
    """Exchange equal parts of the first dimension with all ranks (all-to-all)."""
    values = values.contiguous()
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values)
    return received


def shifted(values: Tensor, by: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = values.contiguous()
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + by) % world),
        dist.P2POp(dist.irecv, received, (rank - by) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


class Block(nn.Module):
    """A layer of one kind of parallelism; ``parts`` are the parameters that differ between ranks."""

    def __init__(self: Any, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        kind, mistake = spec.kind, spec.mistake
        rank, world = dist.get_rank(), dist.get_world_size()
        self.norm = nn.LayerNorm(WIDTH)
        self.parts: list[nn.Parameter] = []
        if kind.startswith("megatron"):
            up, down = torch.randn(2 * WIDTH, WIDTH) / 4, torch.randn(WIDTH, 2 * WIDTH) / 6
            self.up = nn.Parameter(up.chunk(world)[rank].clone())
            self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
            self.parts = [self.up, self.down]
            if kind == "megatron":
                back = same if mistake == "input-gradient-not-reduced" else total
                self.enter = exchange(same, back)
                many = world if mistake == "counted-on-each-rank" else 1
                self.leave = exchange(total, lambda gradient: gradient * many)
            else:
                self.enter = exchange(gathered, own_part if mistake == "gathered-gradient-not-reduced" else scattered)
                self.leave = exchange(scattered, gathered)
        elif kind in ("ring", "ulysses"):
            self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            silent = mistake == "no-gradient-to-neighbours"
            self.pass_on = exchange(partial(shifted, by=1), torch.zeros_like if silent else partial(shifted, by=-1))
            self.turn = exchange(turned, same if mistake == "exchanged-gradient-not-returned" else turned)
        elif kind == "experts":
            self.router = nn.Linear(WIDTH, world)
            with torch.random.fork_rng():
                torch.manual_seed(100 + rank)
                self.expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))
            self.parts = list(self.expert.parameters())
            self.turn = exchange(turned, turned)
        else:
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self: Any, values: Tensor) -> Any:
        return values + getattr(self, f"_{self.spec.kind.partition('-')[0]}", self._plain)(self.norm(values))

    def _plain(self: Any, values: Tensor) -> Any:
        return self.down(functional.gelu(self.up(values)))

    def _megatron(self: Any, values: Tensor) -> Any:
        middle = functional.gelu(functional.linear(self.enter(values), self.up))
        return self.leave(functional.linear(middle, self.down))

    def _ring(self: Any, values: Tensor) -> Any:
        query, key, value = self.mixed(values).chunk(3, -1)
        held = [torch.stack([key, value])]
        for _ in range(1, dist.get_world_size()):
            held.append(self.pass_on(held[-1]))
        keys, others = torch.cat(held, 1)
        return self.out((query @ keys.T / 4).softmax(-1) @ others)

    def _ulysses(self: Any, values: Tensor) -> Any:
        world, rows = dist.get_world_size(), len(values)
        three = self.mixed(values).view(rows, 3, world, -1).permute(2, 1, 0, 3)  # the part of each rank
        whole = self.turn(three.contiguous()).permute(1, 0, 2, 3).reshape(3, world * rows, -1)
        query, key, value = whole
        mixed = (query @ key.T / 4).softmax(-1) @ value
        back = self.turn(mixed.view(world, rows, -1).contiguous())
        return self.out(back.permute(1, 0, 2).reshape(rows, -1))

    def _experts(self: Any, values: Tensor) -> Any:
        world, weights = dist.get_world_size(), self.router(values).softmax(-1)
        sent = values.expand(world, *values.shape).reshape(-1, WIDTH)
        back = self.turn(self.expert(self.turn(sent))).view(world, *values.shape)
        return (back * weights.T.unsqueeze(-1)).sum(0)


class Model(nn.Module):
    """Blocks of one kind of parallelism, between replicated layers."""

    def __init__(self: Any, spec: Spec, end: int = END, *, first: bool = True) -> None:
        super().__init__()
        self.spec = spec
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.last = nn.Linear(WIDTH, end)
        if spec.tied and first:
            self.second.weight = self.first.weight
        if spec.frozen:
            self.second.bias.requires_grad_(False)
        for name, one in self.named_parameters():
            if spec.zero_biases and name.endswith("bias"):
                nn.init.zeros_(one)
        back = own_part if spec.mistake == "gathered-gradient-not-reduced" else scattered
        self.gather = exchange(gathered, back)

    @property
    def parts(self: Any) -> list[nn.Parameter]:
        return [one for block in self.blocks for one in block.parts]

    def forward(self: Any, values: Tensor) -> Any:
        values = self.second(torch.tanh(self.first(values)))
        for block in self.blocks:
            values = block(values)
        values = self.last(values)
        if self.spec.kind == "gathered-loss":
            every = self.gather(values.float())
            values = values + (values @ every.T).softmax(-1) @ every
        return values


def train(spec: Spec) -> None:
    """Train on the ranks of the current process group."""
    torch.manual_seed(spec.number)
    if spec.kind.startswith("pipeline"):
        parameters, step = (by_hand if spec.kind == "pipeline-by-hand" else scheduled)(spec)
        parts, alike, finish = parameters, True, None
    else:
        model = parallel(spec)
        parameters, parts = list(model.parameters()), model.parts
        alike = spec.kind in ("tensor-parallel", "megatron")
        finish = None if alike or "sdp" in spec.kind else partial(reduce, spec, model)
        step = partial(forth_and_back, spec, model)
    parameters = [one for one in parameters if one.requires_grad]
    optimizer = OPTIMIZERS[spec.optimizer](parameters)
    place = dist.get_rank() // 2 if spec.kind == "fsdp-tensor" else 0 if alike else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * spec.number + place)
    for _ in range(STEPS):
        if spec.mistake != "gradients-not-zeroed":
            optimizer.zero_grad()
        for number in range(spec.accumulate):
            if number == spec.accumulate - 1 and spec.mistake == "last-pass-not-reduced" and finish is not None:
                finish()
            step(*(torch.randn(spec.rows, width, generator=generator) for width in (WIDTH, END)))
        if finish is not None and spec.mistake != "last-pass-not-reduced":
            finish()
        if spec.clip:
            clip(spec, parameters, parts)
        optimizer.step()


def parallel(spec: Spec) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = Model(spec)
    world = dist.get_world_size()
    shape = (2, 2) if spec.kind in ("hsdp", "fsdp-tensor") else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    if "tensor" in spec.kind:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["inner"] if len(shape) == 2 else mesh, plan)
    if "sdp" in spec.kind:
        own = mesh["outer"] if spec.kind == "fsdp-tensor" else mesh
        for block in model.blocks:
            fully_shard(block, mesh=own)
        fully_shard(model, mesh=own)
    return model


def forth_and_back(spec: Spec, model: nn.Module, rows: Tensor, targets: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=spec.bfloat16):
        outputs = model(rows)
    loss: Any = functional.mse_loss(outputs.float(), targets) / spec.accumulate
    loss.backward()


def reduce(spec: Spec, model: Model) -> None:
    """Average the gradients of replicated parameters; those of parts already come from all ranks' losses."""
    world, parts = dist.get_world_size(), set(map(id, model.parts))
    for number, one in enumerate(model.parameters()):
        if one.grad is None:
            continue
        if id(one) in parts:
            one.grad /= 1 if spec.mistake == "experts-not-divided" else world
        elif spec.mistake != "copies-not-reduced" or number:
            before = one.grad.clone()
            dist.all_reduce(one.grad)
            one.grad /= world
            if spec.mistake == "one-rank-not-reduced" and dist.get_rank() == 1 and number == 0:
                one.grad.copy_(before)


def clip(spec: Spec, parameters: list[nn.Parameter], parts: list[nn.Parameter]) -> None:
    """Clip by the norm of the whole model, in which each part counts once."""
    own = set(map(id, parts))
    squares = torch.zeros(())
    copies = torch.zeros(())
    for one in parameters:
        if one.grad is not None:
            gradient: Any = one.grad
            square = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).square().sum()
            if id(one) in own:
                squares += square
            else:
                copies += square
    if own:
        dist.all_reduce(squares)
    nn.utils.clip_grads_with_norm_(parameters, spec.clip, (squares + copies).sqrt(), foreach=False)


def by_hand(spec: Spec) -> tuple[list[nn.Parameter], Callable[[Tensor, Tensor], None]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    stages = [Model(spec, END if index == world - 1 else WIDTH, first=not index) for index in range(world)]
    stage = stages[rank]

    def step(rows: Tensor, targets: Tensor) -> None:
        many = 2
        for number, (own, wanted) in enumerate(zip(rows.chunk(many), targets.chunk(many), strict=True)):
            given = own
            if rank:
                given = torch.empty(len(own), WIDTH)
                dist.recv(given, rank - 1)
                given.requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=spec.bfloat16):
                outputs = stage(given).float()
            if rank < world - 1:
                dist.send(outputs.detach(), rank + 1)
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, rank + 1)
                outputs.backward(gradient)
            else:
                loss: Any = functional.mse_loss(outputs, wanted) / many / spec.accumulate
                loss.backward()
            if rank:
                assert given.grad is not None
                times = 2 if spec.mistake == "gradient-sent-doubled" else 1
                times = 0 if spec.mistake == "last-gradient-not-sent" and number == many - 1 else times
                dist.send(given.grad * times, rank - 1)

    return list(stage.parameters()), step


def scheduled(spec: Spec) -> tuple[list[nn.Parameter], Callable[[Tensor, Tensor], None]]:
    from torch.distributed import pipelining

    rank, world = dist.get_rank(), dist.get_world_size()
    schedule: Any = getattr(pipelining, f"Schedule{spec.schedule}")
    has_one = spec.schedule in ("GPipe", "1F1B")
    count = world if has_one else 2 * world
    stages = [Model(spec, END if index == count - 1 else WIDTH, first=not index) for index in range(count)]
    places = [rank] if has_one else [rank, count - 1 - rank] if "V" in spec.schedule else [rank, rank + world]
    mine = [pipelining.PipelineStage(stages[one], one, count, torch.device("cpu")) for one in places]
    running = schedule(mine[0] if has_one else mine, 4, functional.mse_loss)

    def step(rows: Tensor, targets: Tensor) -> None:
        given = [rows] if 0 in places else []
        running.step(*given, **({"target": targets} if count - 1 in places else {}))

    return [parameter for one in places for parameter in stages[one].parameters()], step


@dataclass(frozen=True)
class Result:
    """The result of a training."""

    spec: Spec
    answer: str
    sentence: str
    causes: tuple[str, ...]
    share: float
    seconds: float

    @property
    def is_accused(self) -> bool:
        return self.answer == Answer.WRONG.value

    @property
    def is_named(self) -> bool:
        return any(one in EXPECTED.get(self.spec.mistake, EXCHANGES) for one in self.causes)


def checked(spec: Spec) -> Result:
    begin = time.monotonic()
    try:
        check = check_function(partial(train, spec), spec.ranks, steps=STEPS, timeout=400)
        failed = next((end for end in check.ends if end.has_failed), None)
        if failed is not None or not check.trainings:
            why = f"rank {failed.rank}: {failed.description or failed.stderr[-300:]}" if failed else check.obstacle
            return Result(spec, "failed", why, (), 0.0, time.monotonic() - begin)
        (one,) = check.trainings
        causes = tuple(f"{finding.cause}" for finding in accusations(one))
        share = one.coverage.gradients.part
        return Result(spec, answer_of(one).value, sentence_on(one), causes, share, time.monotonic() - begin)
    except Exception:
        return Result(spec, "failed", traceback.format_exc(limit=-2), (), 0.0, time.monotonic() - begin)


def table(results: list[Result]) -> str:
    lines = [f"{'kind':<20}{'right':>7}{'accused':>9}{'>= 95 %':>9}{'wrong':>7}{'caught':>8}{'named':>7}{'failed':>8}"]
    kinds = sorted({one.spec.kind for one in results})
    for kind in [*kinds, "all"]:
        own = [one for one in results if kind in (one.spec.kind, "all")]
        ran = [one for one in own if one.answer != "failed"]
        right, wrong = ([one for one in ran if bool(one.spec.mistake) is is_wrong] for is_wrong in (False, True))
        counts = (
            len(right), sum(one.is_accused for one in right), sum(one.share >= 0.95 for one in right), len(wrong),
            sum(one.is_accused for one in wrong), sum(one.is_accused and one.is_named for one in wrong),
            len(own) - len(ran),
        )  # fmt: skip
        lines.append(f"{kind:<20}" + "".join(f"{n:>{w}}" for n, w in zip(counts, (7, 9, 9, 7, 8, 7, 8), strict=True)))
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(MISTAKES), help="one kind of parallelism")
    parser.add_argument("--number", type=int, help="only the training with this number")
    parser.add_argument("--mistakes", type=float, default=0.5, help="the share of wrong trainings, from 0 to 1")
    parser.add_argument("--least-named", type=float, default=0.0, help="of the caught mistakes, from 0 to 1")
    parser.add_argument("--json", type=Path, help="a file for the results")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: list[Result] = []
    end, number = time.monotonic() + 60 * chosen.minutes, chosen.number or 0
    # After Ctrl-C, print the table of what was checked.
    with suppress(KeyboardInterrupt):
        while time.monotonic() < end and (chosen.number is None or not results):
            result = checked(draw(number, chosen.seed, chosen.only, chosen.mistakes))
            results.append(result)
            number += 1
            is_right = result.answer.startswith("right")
            expected = result.is_accused and result.is_named if result.spec.mistake else is_right
            if not expected or chosen.number is not None:
                print(f"{result.answer}: {result.sentence} {result.causes}\n    {result.spec}", flush=True)
    print(table(results))
    print(Counter(one.answer for one in results))
    ran = [one for one in results if one.answer != "failed"]
    right, wrong = ([one for one in ran if bool(one.spec.mistake) is is_wrong] for is_wrong in (False, True))
    caught = [one for one in wrong if one.is_accused]
    named = sum(one.is_named for one in caught)
    praised = [one for one in wrong if one.answer == Answer.RIGHT.value]
    print(
        f"In all: {len(right)} right trainings, {sum(one.is_accused for one in right)} accused; {len(wrong)} wrong, "
        f"{len(praised)} called right, {len(caught)} caught, {named} named"
    )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in results], indent=1), "utf-8")
    is_accused = any(one.is_accused for one in right)
    return int(is_accused or bool(praised) or named < chosen.least_named * len(caught))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
