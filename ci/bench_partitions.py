"""Measures how often a partition of blocks into stages is optimal: ours, DeepSpeed's, torchgpipe's, equal counts.

    python ci/bench_partitions.py --deepspeed ENV/bin/python --torchgpipe ENV/bin/python > reports/partitions.md

400 random models of 4 to 12 blocks for 2 to 6 devices, in four kinds. The best partition is found by trying all. The
libraries' own functions are called, each in an interpreter that has the library; otherwise its rows are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from plumbline.trainer.balanced.partition import StageCosts, partition
from plumbline.trainer.balanced.stage_plan import BlockCost, Profile, Stage

CASES, MICRO_BATCHES, SEED = 400, 8, 17
# Tolerance for equality with the best: sums of at most 12 numbers, added in different orders.
ROUNDING = 1 + 24 * sys.float_info.epsilon

DEEPSPEED = """
import json, sys, contextlib
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed
    from deepspeed.runtime.utils import partition_balanced
cases = json.load(sys.stdin)
print(json.dumps([deepspeed.__version__, [[int(b) for b in partition_balanced(w, k)] for w, k in cases]]))
"""
TORCHGPIPE = """
import json, sys
from importlib.metadata import version
from itertools import accumulate
from torchgpipe.balance.blockpartition import solve
cases = json.load(sys.stdin)
bounds = [list(accumulate(map(len, solve(w, k)), initial=0)) for w, k in cases]
print(json.dumps([version("torchgpipe"), bounds]))
"""

Bounds = Sequence[int]


@dataclass(frozen=True)
class Case:
    """A model and the number of devices."""

    kind: str
    profile: Profile
    devices: int

    def every_partition(self) -> Iterator[Bounds]:
        """Return all partitions into non-empty stages."""
        blocks = len(self.profile.blocks)
        for inner in combinations(range(1, blocks), self.devices - 1):
            yield (0, *inner, blocks)

    def slowest(self, bounds: Bounds) -> float:
        """Return the seconds of the slowest stage."""
        return max(sum(block.seconds for block in self.profile.blocks[a:b]) for a, b in pairwise(bounds))

    def peak(self, bounds: Bounds) -> float:
        """Return the largest peak memory of a stage, under 1F1B."""
        costs = StageCosts(self.profile, self.devices, MICRO_BATCHES)
        return max(costs.peak_bytes(a, b, stage) for stage, (a, b) in enumerate(pairwise(bounds)))


def seconds_of(kind: str, count: int, generator: random.Random) -> list[float]:
    """Return each block's seconds."""
    if kind == "uniform":
        return [generator.uniform(0.1, 1.0) for _ in range(count)]
    if kind == "log-normal":
        return [generator.lognormvariate(0.0, 1.0) for _ in range(count)]
    if kind == "transformer":  # embedding, equal layers, a head
        layer = generator.uniform(0.9, 1.1)
        return [0.1, *[layer * generator.uniform(0.97, 1.03) for _ in range(count - 2)], generator.uniform(0.5, 4.0)]
    return [generator.uniform(0.1, 1.0) * 0.8**index for index in range(count)]  # a ResNet's early layers cost more


KINDS = ("uniform", "log-normal", "transformer", "decreasing")


def random_cases() -> list[Case]:
    """Return the cases, the same in every run."""
    generator = random.Random(SEED)
    cases = []
    for number in range(CASES):
        kind = KINDS[number % len(KINDS)]
        blocks = generator.randint(4, 12)
        seconds = seconds_of(kind, blocks, generator)
        saved = [int(one * generator.uniform(0.5, 2.0) * 10**6) for one in seconds]
        state = [int(generator.lognormvariate(0.0, 1.0) * 10**6) for _ in seconds]
        rows = zip(seconds, saved, state, strict=True)
        costs = tuple(BlockCost(str(index), one, kept, held, 0) for index, (one, kept, held) in enumerate(rows))
        cases.append(Case(kind, Profile(costs), generator.randint(2, min(6, blocks - 1))))
    return cases


def ours(case: Case, memory: float | None = None, *, by_memory: bool = False) -> Bounds:
    """Return our partition; ``by_memory`` minimises the peak instead of the time."""
    blocks = case.profile.blocks
    measured = case.profile
    if by_memory:
        measured = Profile(tuple(BlockCost(one.name, 0.0, one.saved_bytes, one.state_bytes, 0) for one in blocks))
    limits = None if memory is None else [int(memory)] * case.devices
    return bounds_of(partition(measured, case.devices, MICRO_BATCHES, limits))


def bounds_of(stages: Sequence[Stage]) -> Bounds:
    """Return where each stage begins, and where the last one ends."""
    return (0, *(stage.last for stage in stages))


def equal_counts(costs: Sequence[float], devices: int) -> Bounds:
    """Return stages with numbers of blocks as equal as possible."""
    return [len(costs) * stage // devices for stage in range(devices + 1)]


def in_interpreter(python: str, program: str, questions: list[tuple[list[float], int]]) -> tuple[str, list[Bounds]]:
    """Return a library's version and its answer."""
    done = subprocess.run(
        [python, "-c", program], input=json.dumps(questions), capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{python} cannot answer:\n{done.stderr}")
    version, answers = json.loads(done.stdout.splitlines()[-1])
    return version, answers


def by_time(case: Case) -> list[float]:
    """Return the cost per block that other libraries get to balance time."""
    return [block.seconds for block in case.profile.blocks]


def by_memory(case: Case) -> list[float]:
    """Return the cost per block that other libraries get to balance memory: a single number each."""
    return [float(block.state_bytes + block.saved_bytes) for block in case.profile.blocks]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter with deepspeed")
    parser.add_argument("--torchgpipe", metavar="PYTHON", help="an interpreter with torchgpipe")
    arguments = parser.parse_args()
    cases = random_cases()
    rows: dict[str, tuple[list[Bounds], list[Bounds]]] = {
        "Plumbline": ([ours(case) for case in cases], [ours(case, by_memory=True) for case in cases])
    }
    for name, python, program in (
        ("DeepSpeed", arguments.deepspeed, DEEPSPEED),
        ("torchgpipe", arguments.torchgpipe, TORCHGPIPE),
    ):
        if python:
            questions = [(costs(case), case.devices) for costs in (by_time, by_memory) for case in cases]
            version, answers = in_interpreter(python, program, questions)
            rows[f"{name} {version}"] = answers[:CASES], answers[CASES:]
    rows["equal counts"] = tuple(  # type: ignore[assignment]
        [equal_counts(costs(case), case.devices) for case in cases] for costs in (by_time, by_memory)
    )
    print(report(cases, rows), end="")


def report(cases: list[Case], rows: dict[str, tuple[list[Bounds], list[Bounds]]]) -> str:
    """Return the page."""
    fastest = [min(map(case.slowest, case.every_partition())) for case in cases]
    lightest = [min(map(case.peak, case.every_partition())) for case in cases]
    times = {name: ratios(cases, found[0], fastest, Case.slowest) for name, found in rows.items()}
    peaks = {name: ratios(cases, found[1], lightest, Case.peak) for name, found in rows.items()}
    lines = [
        "# Partitions of blocks into stages",
        "",
        f"`python ci/bench_partitions.py`: {CASES} random models of 4 to 12 blocks for 2 to 6 devices, "
        f"{MICRO_BATCHES} micro-batches. A partition is optimal if no other is better. Ratios are to the best.",
        "",
        "*Time* is the time of the slowest stage, which sets the pace of the pipeline. *Memory* is the largest peak of",
        "a stage under 1F1B: its state, and the activations of one micro-batch for each stage from it to the end.",
        "DeepSpeed's `partition_balanced` minimises the difference between the largest and the smallest stage;",
        "torchgpipe's `blockpartition.solve` allows a difference of one largest block. Both take one number per block:",
        "for memory, its state and the activations of one micro-batch. Ours balances memory if all times are equal.",
        "",
        "| partition | time: optimal | worst ratio | mean ratio | memory: optimal | worst ratio | mean ratio |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name in rows:
        lines.append(f"| {name} | {summary(times[name])} | {summary(peaks[name])} |")
    lines += ["", "## Time, by kind of model", "", f"| partition | {' | '.join(KINDS)} |", "| --- |" + " --: |" * 4]
    for name in rows:
        of_kinds = ([r for r, case in zip(times[name], cases, strict=True) if case.kind == kind] for kind in KINDS)
        cells = (f"{optimal(of_kind) / len(of_kind):.0%}, × {max(of_kind):.2f}" for of_kind in of_kinds)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "The share of cases that are optimal, and the worst ratio.", "", *limited(cases, rows, lightest)]
    return "\n".join(lines) + "\n"


def limited(cases: list[Case], rows: dict[str, tuple[list[Bounds], list[Bounds]]], lightest: list[float]) -> list[str]:
    """Return the section on devices with slightly more memory than necessary."""
    lines = [
        "## Time with limited memory",
        "",
        "Each device may hold 1.1 times the least possible peak. Partitions balance time; only ours knows the limit.",
        "",
        "| partition | fits | is the fastest that fits |",
        "| --- | --: | --: |",
    ]
    limits = [1.1 * least for least in lightest]
    fastest = [
        min(case.slowest(bounds) for bounds in case.every_partition() if case.peak(bounds) <= int(limit))
        for case, limit in zip(cases, limits, strict=True)
    ]
    for name, (found, _) in rows.items():
        if name == "Plumbline":
            found = [ours(case, limit) for case, limit in zip(cases, limits, strict=True)]
        triples = zip(cases, found, limits, fastest, strict=True)
        fitting = [(case.slowest(one), best) for case, one, limit, best in triples if case.peak(one) <= int(limit)]
        best_of_them = sum(seconds <= best * ROUNDING for seconds, best in fitting)
        lines.append(f"| {name} | {len(fitting)} of {CASES} | {best_of_them} of {CASES} |")
    return lines


def ratios(
    cases: list[Case], found: list[Bounds], best: list[float], value: Callable[[Case, Any], float]
) -> list[float]:
    """Return each partition's value relative to the best; an empty stage counts like any other."""
    return [value(case, bounds) / least for case, bounds, least in zip(cases, found, best, strict=True)]


def optimal(of_cases: Sequence[float]) -> int:
    """Return how many of the ratios are 1."""
    return sum(ratio <= ROUNDING for ratio in of_cases)


def summary(of_cases: Sequence[float]) -> str:
    """Return three cells: the number of optimal cases, the worst ratio and the mean ratio."""
    count = len(of_cases)
    return f"{optimal(of_cases)} of {count} | × {max(of_cases):.2f} | × {sum(of_cases) / count:.3f}"


if __name__ == "__main__":
    main()
