"""The judge's hunt: random right trainers must not be accused, and random mistakes in them must be caught.

    python ci/judge_hunt.py --right 2000 --mutated 1000 --seed 1 --minutes 10   # run again to continue
    python ci/judge_hunt.py --seed 1 --only 17                     # one draw, as recorded, with all of its findings
    python ci/judge_hunt.py --report reports/judge-hunt                         # the counts of all seeds
    python ci/judge_hunt.py --report reports/judge-hunt --page reports/judge-hunt.md

Each draw is a way to write a training loop, a problem, and a cell of up to three ranks. Real ranks train it, and the
judge examines it; then the same with one mistake. The effect of a mistake is measured against the right training.
Mistakes that change no bit, or no more than the differences between other right trainers, are not scored. Exits with 1
if a right trainer was accused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "judge_hunt"))

import torch
from hunt_page import page
from hunt_records import Records, Tried, in_all, summary
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from mutations import Mutation, mutations
from traces_apart import apart
from trainer_draws import Draw, TrainerDraw, draws

from plumbline.core.errors import TraceError, WorkloadError
from plumbline.core.finding import UNEXPLAINED, Finding, diagnosis
from plumbline.core.outcome import Outcome
from plumbline.engine.examine import examine
from plumbline.evidence.read import read_trace
from plumbline.evidence.trace import Trace
from plumbline.hunt.search import trained_on, write_problem
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.own_workloads.check import refuse_unfit
from plumbline.own_workloads.load import workload_of
from plumbline.workloads import WORKLOADS

SUBJECT = Path(__file__).parent / "judge_hunt" / "drawn_trainer.py"
DRAWN_BEFORE = 8
OTHERS = (
    {"reduction": "gather", "implementation": "foreach", "divided": "before"},
    {"reduction": "tree", "implementation": "for-loop", "divided": "loss"},
    {"reduction": "flat", "implementation": "fused", "divided": "after"},
)
"""Other right ways to train the same problem on the same samples; their differences are rounding."""


def main() -> int:
    """Return 1 if a right trainer was accused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--right", type=int, default=2000, help="right trainers in all (default: %(default)s)")
    parser.add_argument("--mutated", type=int, default=1000, help="mistakes in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    parser.add_argument("--only", type=int, metavar="N", help="try only draw N, and record nothing")
    parser.add_argument("--folder", type=Path, default=Path("reports", "judge-hunt"))
    parser.add_argument("--report", type=Path, metavar="DIR", help="try nothing; print the counts of all seeds")
    parser.add_argument("--page", type=Path, metavar="FILE", help="with --report: write the page, with explanations")
    options = parser.parse_args()
    if options.report:
        tried = [one for file in sorted(options.report.glob("*.jsonl")) for one in Records(file).tried]
        if options.page:
            options.page.write_text("\n".join([*page(tried), ""]), "utf-8")
        print("\n".join(summary(tried)))
        return 0
    records = Records(options.folder / f"seed-{options.seed}.jsonl")
    until = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="plumbline-judge-hunt-") as scratch, Hunt(Path(scratch)) as hunt:
        if options.only is not None:
            draw, mutation = records.drawn(options.only) or drawn(options.seed, options.only)
            for tried in hunt.pair(options.seed, options.only, draw, mutation, verbose=True):
                print(tried)
            return 0
        for number in range(max(options.right, options.mutated)):
            if time.monotonic() > until:
                break
            due = number < options.mutated
            if records.has(number, mutated=due):
                continue
            draw, mutation = drawn(options.seed, number)
            for tried in hunt.pair(options.seed, number, draw, mutation if due else None):
                records.add(tried)
    print("\n".join([*summary(records.tried), "", f"In all: {in_all(records.tried)}"]))
    return int(any(one.accused for one in records.tried if one.mutation is None and one.obstacle is None))


def drawn(seed: int, number: int) -> tuple[Draw, Mutation]:
    """Return a seed's draw of this number.

    Hypothesis starts with the simplest draws and then varies them, so the last of several draws with their own seed is
    unique. It also tries numbers from the source code, so a draw changes with the code: what was tried is drawn again
    from its record.
    """
    found: list[tuple[Draw, Mutation]] = []

    @seeded(seed * 1_000_003 + number)
    @settings(
        max_examples=DRAWN_BEFORE, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(draws().flatmap(lambda one: st.tuples(st.just(one), mutations(one))))
    def collect(pair: tuple[Draw, Mutation]) -> None:
        found.append(pair)

    collect()
    return found[-1]


@dataclass(frozen=True)
class Judged:
    """A training: its record, and the judge's findings."""

    findings: tuple[Finding, ...]
    trace: Trace | None
    seconds: float

    @property
    def bad(self) -> Finding | None:
        """The first bad finding, or None."""
        return diagnosis(self.findings)

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(one.outcome.is_bad and one.outcome is not Outcome.ERRORED for one in self.findings)

    @property
    def is_vacuous(self) -> bool:
        """Whether a check found that the problem shows nothing."""
        return any(one.outcome is Outcome.ERRORED and one.message.startswith("vacuous") for one in self.findings)


class Hunt:
    """Trains and judges draws on one warm pool. Use with ``with``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "draw.json"
        os.environ["PLUMBLINE_DRAW"] = str(self.file)
        self.pool = Pool(str(SUBJECT))

    def __enter__(self) -> Hunt:
        return self

    def __exit__(self, *_: object) -> None:
        with closing(self.pool):
            pass

    def pair(
        self, seed: int, number: int, draw: Draw, mutation: Mutation | None, verbose: bool = False
    ) -> Iterator[Tried]:
        """Yield the results of a right trainer and of the same with a mutation."""
        here = Tried(seed, number, asdict(draw.trainer), asdict(draw.recipe), draw.cell.id)
        try:
            right = self.judged(draw, None)
        except WorkloadError as error:
            yield replace(here, obstacle=f"unfit: {str(error)[:60]}")
            return
        if right.is_vacuous:
            yield replace(here, obstacle="vacuous", seconds=right.seconds)
            return
        yield _with_findings(here, right, verbose)
        if mutation is None:
            return
        wrong = self.judged(draw, mutation)
        difference = apart(right.trace, wrong.trace)
        vacuous = "same bits" if difference == 0 else "no verdict" if wrong.is_vacuous and not wrong.failed else None
        if wrong.bad is None and 0 < difference < float("inf") and difference <= self.rounding(draw, right):
            vacuous = "rounding"
        tried = _with_findings(here, wrong, verbose)
        found = wrong.bad
        named = found is not None and found.cause not in (None, UNEXPLAINED) and found.family in mutation.families
        named_or_nameless = named if mutation.families else None
        yield replace(tried, mutation=asdict(mutation), difference=difference, vacuous=vacuous, named=named_or_nameless)

    def rounding(self, draw: Draw, right: Judged) -> float:
        """Return the largest difference between this right trainer and others of the problem."""
        found = 0.0
        for changes in OTHERS:
            if draw.cell.topology.devices == 1:
                changes = {**changes, "reduction": "none"}
            if draw.recipe.inputs == "sparse-tokens":
                changes = {**changes, "implementation": "given"}
            other = replace(TrainerDraw(sampler=draw.trainer.sampler), **changes)  # type: ignore[arg-type]
            found = max(found, apart(right.trace, self.judged(replace(draw, trainer=other), None).trace))
        return found

    def judged(self, draw: Draw, mutation: Mutation | None) -> Judged:
        """Train a draw and judge it.

        Raises:
            WorkloadError: the problem is not suitable for judging.
        """
        begun = time.monotonic()
        values = {"trainer": asdict(draw.trainer), "mutation": mutation and asdict(mutation)}
        self.file.write_text(json.dumps(values), "utf-8")
        cell = trained_on(draw.cell, draw.recipe, write_problem(draw.recipe, self.folder))
        evidence = self.folder / "trace"
        try:
            if mutation is None:
                refuse_unfit(workload_of(cell), [cell.topology.devices])
            findings = examine(self.pool, cell, evidence, Settings(time_limit=30.0)).findings
            try:
                trace = read_trace(evidence)
            except TraceError:
                trace = None
        finally:
            shutil.rmtree(evidence, ignore_errors=True)
            WORKLOADS.pop(cell.workload, None)
        return Judged(findings, trace, time.monotonic() - begun)


def _with_findings(tried: Tried, judged: Judged, verbose: bool) -> Tried:
    if verbose:
        for one in judged.findings:
            print(f"    {one.check}: {one.outcome.value} ({one.family}, {one.cause}): {one.message}", flush=True)
    found = judged.bad
    errors = [
        one.error_x_noise / one.limit_x_noise for one in judged.findings if one.error_x_noise and one.limit_x_noise
    ]
    tried = replace(tried, seconds=round(judged.seconds, 3), x_limit=max(errors, default=None))
    if found is None:
        return tried
    return replace(
        tried, accused=True, check=found.check, cause=found.cause, family=found.family, message=found.message[:400]
    )


if __name__ == "__main__":
    sys.exit(main())
