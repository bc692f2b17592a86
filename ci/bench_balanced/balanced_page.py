"""Measurements of the self-balancing trainer, and the page about them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from staged_models import Problem
from turns import Turn

from plumbline.drawing import duration
from plumbline.machine.hardware import cpu_model, usable_cores
from plumbline.statistics.intervals import FigureInterval, figure_interval
from plumbline.trainer.balanced.stage_plan import Balance, size

TIME, MEMORY = 0.15, 0.10
"""How far predictions may be off."""

FASTER = {"GPT": 1.6}
"""The required speed-up over one device, by model."""


@dataclass(frozen=True)
class Measured:
    """A model's trainings: the turns of each, one per round, and what balanced says about itself.

    ``beside another`` and ``the other`` are two trainings on one device each, at the same time.
    """

    problem: Problem
    steps: int
    turns: dict[str, list[Turn]]
    balanced: Balance
    equal: Balance

    def rate(self, name: str) -> FigureInterval:
        """Return samples per second."""
        samples = self.problem.batch_size * self.steps
        return figure_interval([samples / turn.seconds for turn in self.turns[name]])

    def faster_than(self, name: str) -> FigureInterval:
        """Return the speed-up of balanced over another training, paired by rounds."""
        pairs = zip(self.turns[name], self.turns["balanced"], strict=True)
        return figure_interval([other.seconds / own.seconds for other, own in pairs])

    def ceiling(self) -> FigureInterval:
        """Return the speed-up of two cores that compute independently over one."""
        triples = zip(self.turns["one"], self.turns["beside another"], self.turns["the other"], strict=True)
        return figure_interval([one.seconds / a.seconds + one.seconds / b.seconds for one, a, b in triples])

    def busy(self, name: str) -> list[tuple[float, float]]:
        """Return the seconds per step that each rank computes, and their share of the step."""
        turns = self.turns[name]
        return [
            (
                median(turn.busy[rank] for turn in turns) / self.steps,
                median(turn.busy[rank] / turn.seconds for turn in turns),
            )
            for rank in range(len(turns[0].busy))
        ]


@dataclass(frozen=True)
class Goal:
    """A goal, the measured value, and whether it is met."""

    text: str
    reached: str
    met: bool


def goals(measured: Measured) -> Iterator[Goal]:
    """Yield the goals of a model."""
    name, plan, found = measured.problem.name, measured.balanced.plan, measured.balanced.measured
    assert found is not None  # after all trainings
    errors = [
        max((b / a - 1 for a, b in zip(predicted, taken, strict=True)), key=abs)
        for predicted, taken in (
            (plan.predicted.stage_seconds, found.stage_seconds),
            (plan.predicted.stage_peak_bytes, found.stage_peak_bytes),
        )
    ]
    yield Goal(f"{name}: each stage's time within {TIME:.0%}", f"{errors[0]:+.1%}", abs(errors[0]) <= TIME)
    yield Goal(f"{name}: each stage's peak memory within {MEMORY:.0%}", f"{errors[1]:+.1%}", abs(errors[1]) <= MEMORY)
    if name in FASTER:
        faster = measured.faster_than("one")
        yield Goal(f"{name}: × {FASTER[name]} over one device", told(faster), faster.value >= FASTER[name])
    faster = measured.faster_than("equal")
    yield Goal(f"{name}: not slower than the equal-count split", told(faster), faster.high >= 1)


def missed_goals(every: Sequence[Measured]) -> list[Goal]:
    """Return the goals that were not met."""
    return [goal for measured in every for goal in goals(measured) if not goal.met]


def told(one: FigureInterval) -> str:
    """Format a ratio with its bounds."""
    return f"× {one.value:.2f} ({one.low:.2f} … {one.high:.2f})"


def page(every: Sequence[Measured], rounds: int, steps: int, loads: Sequence[float]) -> str:
    """Return the page."""
    lines = [
        "# The self-balancing trainer on two devices",
        "",
        f"Made by `python ci/bench_balanced.py`: {rounds} rounds of {steps} steps. Torch {torch.__version__}, Python "
        f"{platform.python_version()}, {usable_cores()} cores ({cpu_model()}), load averages of "
        f"{' and '.join(f'{load:.1f}' for load in loads)} before and after. Each device is one core, float32, gloo.",
        "",
        *(f"- {one.problem.name}: {one.problem.description}." for one in every),
        "",
        "## Goals",
        "",
        *table(("goal", "reached", ""), [(g.text, g.reached, "met" if g.met else "missed") for g in
                                         (goal for one in every for goal in goals(one))]),
        "",
        "## Predicted and measured",
        "",
        "*Time* is the forward and backward of one micro-batch. Measured times are medians over training, while both",
        "cores are busy; measured memory is the peak of the first two steps. Predictions are those of the plan.",
        "",
        *table(("model", "stage", "blocks", "time: predicted", "measured", "off by", "peak memory: predicted",
                "measured", "off by"), [row for one in every for row in stage_rows(one)]),
        "",
        "*Step* is a batch without the optimizer's step. The predicted step does not include transfers.",
        "",
        *table(("model", "split", "micro-batches", "step: predicted", "measured", "bubble: predicted", "measured"),
               [row for one in every for row in step_rows(one)]),
        "",
        "## Speed",
        "",
        "Samples per second. *Equal counts* is the same trainer with the same number of blocks on each device, and the",
        "best number of micro-batches for this split. *By hand* is 1F1B with the split and micro-batches of balanced,",
        "in plain `isend` and `recv`. Each figure is the median over the rounds, with the interval that holds the",
        "typical value 95 times in a hundred.",
        "",
        *table(("model", "one device", "balanced", "equal counts", "by hand"),
               [(one.problem.name, *(rate(one.rate(name)) for name in ALONE)) for one in every]),
        "",
        "Balanced relative to the others, by rounds. *Ceiling* is two trainings at the same time, on one device each,",
        "over one alone: the gain from the second core if ranks exchange nothing and never wait.",
        "",
        *table(("model", "over one device", "over equal counts", "over by hand", "ceiling over one device"),
               [(one.problem.name, *(told(one.faster_than(name)) for name in ("one", "equal", "by hand")),
                 told(one.ceiling())) for one in every]),
        "",
        "Seconds of a step that each rank computes (its processor time, including transfers), and their share of the",
        "step. The rest is waiting.",
        "",
        *table(("model", "one device", "balanced", "equal counts", "by hand"),
               [(one.problem.name, *(shares(one.busy(name)) for name in ALONE)) for one in every]),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


ALONE = ("one", "balanced", "equal", "by hand")


def stage_rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    """Yield a row per stage."""
    balance = measured.balanced
    assert balance.measured is not None
    predicted, found = balance.plan.predicted, balance.measured
    for number, stage in enumerate(balance.plan.stages):
        seconds = predicted.stage_seconds[number], found.stage_seconds[number]
        peaks = predicted.stage_peak_bytes[number], found.stage_peak_bytes[number]
        yield (
            measured.problem.name,
            str(number),
            str(stage.last - stage.first),
            *map(duration, seconds),
            f"{seconds[1] / seconds[0] - 1:+.1%}",
            *map(size, peaks),
            f"{peaks[1] / peaks[0] - 1:+.1%}",
        )


def step_rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    """Yield a row per split."""
    for name, balance in (("balanced", measured.balanced), ("equal counts", measured.equal)):
        predicted, found = balance.plan.predicted, balance.measured
        assert found is not None
        counts = " + ".join(str(stage.last - stage.first) for stage in balance.plan.stages)
        yield (
            measured.problem.name,
            f"{name}: {counts} blocks",
            str(balance.plan.micro_batches),
            duration(predicted.step_seconds),
            duration(found.step_seconds),
            f"{predicted.bubble_share:.0%}",
            f"{found.bubble_share:.0%}",
        )


def shares(busy: Sequence[tuple[float, float]]) -> str:
    """Format the seconds in which each rank computes, and their share of a step."""
    return ", ".join(f"{duration(seconds)} ({part:.0%})" for seconds, part in busy)


def rate(one: FigureInterval) -> str:
    """Format samples per second with their bounds."""
    return f"{one.value:.4g} ({one.low:.4g} … {one.high:.4g})"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    return [
        f"| {' | '.join(headers)} |",
        f"|{'|'.join(' --- ' if index == 0 else ' --: ' for index in range(len(headers)))}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
