"""Measures whether the self-balancing trainer meets its predictions, and how much faster two devices are than one.

    python ci/bench_balanced.py --report reports/balanced.md        # about eight minutes
    python ci/bench_balanced.py --models GPT --rounds 4             # one model, printed

Three models on two devices of one core each: a GPT, a ResNet, and a perceptron with one huge embedding
(``ci/bench_balanced/staged_models.py``). Five trainings of each model run at a time; one computes while the others wait
(``turns.py``): the trainer on one device, twice; balanced; balanced with the equal-count split instead of its own; and
hand-written 1F1B (``by_hand.py``) with the split and micro-batches of balanced. In each round, every training takes a
few steps. Then both trainings on one device take steps at the same time, which shows what the second core adds.
Ratios compare trainings of one round; the table has their median and a 95 % interval. Run it on a quiet machine. Exits
with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench_balanced"))

from balanced_page import Measured, missed_goals, page
from by_hand import train_by_hand
from staged_models import SIZES, Problem, Task
from turns import CORES, WARM_UP, Pace, Training, Turn

from plumbline.trainer import Trainer
from plumbline.trainer.balanced import planning
from plumbline.trainer.balanced.stage_plan import Balance, Profile, Stage, StagePlan


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="GPT, ResNet, embedding (default: all)")
    parser.add_argument("--size", choices=SIZES, default="real")
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="of each training in a round (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="the file to write")
    options = parser.parse_args(arguments)
    if len(CORES) < 2:
        parser.error(f"two devices need one core each, but this process may use {len(CORES)}")
    torch.set_num_threads(1)  # ranks are forked, which requires that there are no other threads
    problems = [one for one in SIZES[options.size]() if options.models is None or one.name in options.models]
    loads = [os.getloadavg()[0]]
    measured = []
    for problem in problems:
        print(f"{problem.name}: {problem.description}", file=sys.stderr, flush=True)
        measured.append(measure(problem, options.rounds, options.steps))
    loads.append(os.getloadavg()[0])
    text = page(measured, options.rounds, options.steps, loads)
    if options.report is not None:
        options.report.write_text(text, encoding="utf-8")
    print(text, end="")
    return 1 if missed_goals(measured) else 0


def measure(problem: Problem, rounds: int, steps: int) -> Measured:
    """Measure the trainings of a model in turn."""
    every = WARM_UP + rounds * steps
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_trainings:

        def begin(train: Callable[[list[Pace]], Any], ranks: int) -> Training:
            training = Training(train, ranks, steps)
            open_trainings.callback(training.close)
            return training

        one = begin(partial(train_on_one, problem, every + rounds * steps), 1)  # has two turns per round
        other = begin(partial(train_on_one, problem, every), 1)
        balanced = begin(partial(train_balanced, problem, every), 2)
        equal = begin(partial(train_with_equal_counts, problem, every), 2)
        planned = Balance.from_dict(balanced.news).plan
        by_hand = begin(
            partial(train_by_hand, problem, layers_of(planned), planned.micro_batches, every, Path(folder)), 2
        )
        turns: dict[str, list[Turn]] = {}
        for number in range(rounds):
            cores = [CORES[number % 2], CORES[1 - number % 2]]  # they may differ in speed
            alone = {"one": one, "balanced": balanced, "equal": equal, "by hand": by_hand}
            order = list(alone.items())
            for name, training in order if number % 2 else reversed(order):
                training.go(cores[: len(training.wires)])
                turns.setdefault(name, []).append(training.wait())
            for training, core in zip((one, other), cores, strict=True):
                training.go([core])
            turns.setdefault("beside another", []).append(one.wait())
            turns.setdefault("the other", []).append(other.wait())
        return Measured(problem, steps, turns, Balance.from_dict(balanced.end()), Balance.from_dict(equal.end()))


def layers_of(planned: StagePlan) -> list[list[int]]:
    """Return the layer numbers of each stage."""
    stages = []
    for stage in planned.stages:
        calls = [call for block in planned.blocks[stage.first : stage.last] for call in block.name.split(" + ")]
        stages.append(list(dict.fromkeys(int(call.split(".")[1]) for call in calls)))
    if len(set().union(*stages)) < sum(map(len, stages)):
        raise SystemExit(f"Balanced splits a layer, which the hand-written version does not support: {stages}.")
    return stages


def train_on_one(problem: Problem, steps: int, paces: list[Pace]) -> None:
    """Train whole batches on one device."""
    task = Task(problem, steps, lambda _, optimizer: paces[0].follow(optimizer))
    Trainer(accelerator="cpu", max_steps=steps).fit(task)


def train_balanced(problem: Problem, steps: int, paces: list[Pace]) -> dict[str, Any]:
    """Train on two devices; return the plan and the measurements."""

    def begun(task: Task, optimizer: torch.optim.Optimizer) -> None:
        paces[task.trainer.rank].follow(optimizer, lambda: task.trainer.balance.as_dict())

    trainer = Trainer(gpus=2, distributed_backend="balanced", accelerator="cpu", max_steps=steps)
    trainer.fit(Task(problem, steps, begun))
    return trainer.balance.as_dict()  # type: ignore[no-any-return]


def train_with_equal_counts(problem: Problem, steps: int, paces: list[Pace]) -> dict[str, Any]:
    """Train on two devices with the same number of blocks on each, and the best number of micro-batches."""
    # This process is forked for this training only.
    planning.partition, planning.moved_by_one = equal_counts, lambda stages: iter(())
    return train_balanced(problem, steps, paces)


def equal_counts(profile: Profile, stages: int, *_: Any) -> tuple[Stage, ...]:
    """Return stages with numbers of blocks as equal as possible."""
    bounds = [len(profile.blocks) * stage // stages for stage in range(stages + 1)]
    return tuple(Stage(first, last) for first, last in pairwise(bounds))


if __name__ == "__main__":
    sys.exit(main())
