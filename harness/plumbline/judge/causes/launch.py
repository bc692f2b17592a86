"""Why a launch broke, judged by what ranks printed when they ended, and by how many steps each had taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome
from plumbline.evidence.trace import CONNECTION_LOST, RankTrace, Trace
from plumbline.judge.hypothesis import CountedCase, Hypothesis, Match, holds, register


@dataclass(frozen=True, eq=False)
class LaunchCase(CountedCase):
    """A launch whose trace is not complete, and what the check found."""

    finding: Finding
    trace: Trace
    cell: Cell

    @property
    def done(self) -> list[RankTrace]:
        return [rank for rank in self.trace.ranks if not rank.error]

    @property
    def output(self) -> list[str]:
        return [rank.error or "" for rank in self.trace.ranks] + [exit.said for exit in self.trace.exits.values()]

    def printed(self, words: str) -> bool:
        return any(words in text for text in self.output)

    @property
    def world_sizes(self) -> set[int]:
        return {rank.world_size for rank in self.trace.ranks}

    @property
    def another_world(self) -> bool:
        broken = self.trace.exits or any(rank.error for rank in self.trace.ranks)
        return not broken and self.world_sizes != {self.cell.processes}

    @property
    def waited(self) -> bool:
        """Whether a rank waited for others that had ended or were waiting for something else."""
        in_collective = any(exit.waits_in for exit in self.trace.exits.values())
        hung = self.finding.outcome is Outcome.TIMED_OUT and (in_collective or bool(self.done))
        return hung or any(words in self.finding.message for words in CONNECTION_LOST)


LaunchHypothesis = Hypothesis[LaunchCase, Match]


def _another_world(case: LaunchCase) -> Iterator[Match]:
    if case.another_world:
        sizes = " and ".join(map(str, sorted(case.world_sizes))) or "no ranks"
        yield Match(figures={"sizes": sizes, "world": case.cell.processes})


def _idle_ranks(case: LaunchCase) -> Iterator[Match]:
    idle = [rank.rank for rank in case.done if not rank.steps]
    if idle and len(idle) < len(case.trace.ranks):
        yield Match(rank=idle[0], figures={"idle": idle[0]})


def _unused_parameter(case: LaunchCase) -> Iterator[Match]:
    done = [rank for rank in case.done if rank.steps]
    every = {name for rank in done for step in rank.steps for name in step.gradients}
    missing = sorted(name for rank in done for name in every - rank.steps[-1].gradients.keys())
    if case.waited and missing:
        yield Match(figures={"name": missing[0]})


def _ranks_differ_in_steps(case: LaunchCase) -> Iterator[Match]:
    done = [rank for rank in case.done if rank.steps]
    counts = {len(rank.steps) for rank in done}
    if case.waited and len(counts) == 1 and len(done) < len(case.trace.ranks) + len(case.trace.exits):
        yield Match(figures={"steps": counts.pop()})


SEE_LOG = "see the rank's log"

register(
    LaunchCase,
    LaunchHypothesis("trained-alone", "launch", holds(lambda case: case.another_world and case.world_sizes == {1}),
        "every rank trained in a world of one",
        "create a process group from MASTER_ADDR, RANK and WORLD_SIZE", 190),
    LaunchHypothesis("another-world", "launch", _another_world,
        "ranks trained in a world of {sizes} instead of {world}",
        "check that the process group covers all nodes", 180),
    LaunchHypothesis("trained-on-another-device", "launch",
        holds(lambda case: bool(case.trace.elsewhere(case.cell.accelerator))),
        "the model ran on a different type of device than the cell asks for",
        "move the model and each batch to job.device", 175),
    LaunchHypothesis("some-ranks-never-stepped", "launch", _idle_ranks,
        "rank {idle} ended without an optimizer step, while others waited",
        "check that every rank takes part in the training", 170),
    # Errors that torch raises when a mistake stops training: reducer.cpp, grad_scaler.py in github.com/pytorch/pytorch.
    LaunchHypothesis("reduction-never-finished", "unused-params",
        holds(lambda case: case.printed("Expected to have finished reduction in the prior iteration")),
        "a parameter did not contribute to the loss, so DDP's reduction did not finish",
        "set find_unused_parameters=True", 169),
    LaunchHypothesis("reduced-twice", "unused-params",
        holds(lambda case: case.printed("Expected to mark a variable ready only once")),
        "DDP reduced a parameter twice in one step",
        "check whether it is used in two backward passes, or checkpointed twice", 168),
    LaunchHypothesis("graph-not-static", "unused-params",
        holds(lambda case: case.printed("Your training graph has changed in this iteration")),
        "steps do not all use the same parameters, although static_graph is set",
        "remove static_graph=True", 167),
    LaunchHypothesis("unscaled-twice", "amp",
        holds(lambda case: case.printed("unscale_() has already been called")),
        "gradients were unscaled twice in one step",
        "call scaler.unscale_() once per step", 166),
    LaunchHypothesis("weights-in-float16", "amp",
        holds(lambda case: case.printed("Attempting to unscale FP16 gradients")),
        "the weights are stored in float16",
        "keep the optimizer's weights in float32 and use autocast", 165),
    LaunchHypothesis("no-space", "launch",
        holds(lambda case: case.printed("No space left on device")),
        "a disk, or /dev/shm, is full",
        "free space on the disk or in /dev/shm, or set TMPDIR to another folder", 164),
    LaunchHypothesis("port-in-use", "launch",
        holds(lambda case: case.printed("EADDRINUSE")),
        "the trainer uses a port that is already in use",
        "use the free port in MASTER_PORT", 163),
    LaunchHypothesis("left-before-the-others-joined", "sync",
        # Only the first rank to fail counts: after an exception on one rank, others raise this as well.
        holds(lambda case: "connectFullMesh failed" in case.finding.message),
        "a rank finished before the others had connected to it",
        "end with a collective operation that waits for all ranks, such as a barrier", 150),
    LaunchHypothesis("waits-for-an-unused-parameter", "unused-params", _unused_parameter,
        "a rank did not use {name}, so it did not reduce its gradient, and the other ranks wait for it",
        "reduce every parameter on every rank, with zeros where there is no gradient", 140),
    LaunchHypothesis("ranks-differ-in-steps", "data", _ranks_differ_in_steps,
        "some ranks finished after {steps} steps while others waited for them",
        "give every rank the same number of batches", 130),
    LaunchHypothesis("collective-not-joined", "sync", holds(lambda case: case.waited),
        "a rank waits in a collective operation that the others do not call",
        "call the same collective operations in the same order on all ranks", 120),
    LaunchHypothesis("raised", "launch", holds(lambda case: case.finding.outcome is Outcome.ERRORED),
        "the launch ended with an error", SEE_LOG, 40),
    LaunchHypothesis("died", "launch", holds(lambda case: case.finding.outcome is Outcome.CRASHED),
        "a process of the launch died", SEE_LOG, 30),
    LaunchHypothesis("hung", "launch", holds(lambda case: case.finding.outcome is Outcome.TIMED_OUT),
        "the launch did not end in time", SEE_LOG, 20),
    LaunchHypothesis("broken", "launch", holds(lambda case: True),
        "the launch failed", SEE_LOG, 10),
)  # fmt: skip
