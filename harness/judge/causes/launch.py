"""Why a launch broke: what ranks said when they ended, and how far each of them had come."""

from __future__ import annotations

from harness.core.cell import Cell
from harness.core.finding import Finding
from harness.core.outcome import Outcome
from harness.evidence.trace import Trace
from harness.judge.causes.cause import Cause, explained

WORDS = (
    (
        "Expected to have finished reduction in the prior iteration",
        Cause("reduction-never-finished", "unused-params", "a parameter took no part in a loss, and DDP was not told"),
    ),
    (
        "Expected to mark a variable ready only once",
        Cause("reduced-twice", "unused-params", "a parameter is used in two backwards, or checkpointed twice"),
    ),
    (
        "Your training graph has changed in this iteration",
        Cause("graph-not-static", "unused-params", "steps do not all use the same parameters: leave static_graph out"),
    ),
    (
        "unscale_() has already been called",
        Cause("unscaled-twice", "amp", "scaler.unscale_ once a step"),
    ),
    (
        "Attempting to unscale FP16 gradients",
        Cause("weights-in-float16", "amp", "the optimizer needs weights in float32"),
    ),
    (
        "No space left on device",
        Cause("no-space", "launch", "make room on the disk or in /dev/shm, or name another folder with TMPDIR"),
    ),
    (
        "EADDRINUSE",
        Cause("port-in-use", "launch", "the trainer insists on a port that is taken; MASTER_PORT names a free one"),
    ),
)  # fmt: skip
"""What torch says where a mistake stops training: https://github.com/pytorch/pytorch, reducer.cpp, grad_scaler.py."""

PEER = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "Timed out waiting", "recv, timeout")


def explain(finding: Finding, trace: Trace, cell: Cell) -> Finding:
    """Return a finding about a launch with a cause."""
    return explained(
        finding,
        _world(trace, cell),
        _idle_ranks(trace),
        _known_words(trace),
        _left_early(finding),
        _missed_collective(finding, trace),
        _raised(finding),
    )


def _world(trace: Trace, cell: Cell) -> Cause | None:
    sizes = {rank.world_size for rank in trace.ranks}
    broken = trace.exits or any(rank.error for rank in trace.ranks)
    if broken or sizes == {cell.processes}:
        return None
    if sizes == {1}:
        look = "nobody joined a process group with the others: are MASTER_ADDR, RANK and WORLD_SIZE read?"
        return Cause("trained-alone", "launch", look)
    return Cause("another-world", "launch", "ranks joined a group that is not the whole world: that of a node?")


def _known_words(trace: Trace) -> Cause | None:
    said = [rank.error or "" for rank in trace.ranks] + [exit.said for exit in trace.exits.values()]
    return next((cause for words, cause in WORDS if any(words in text for text in said)), None)


def _idle_ranks(trace: Trace) -> Cause | None:
    """Some ranks trained to an end without a step, and others, who waited for them, broke."""
    done = [rank for rank in trace.ranks if not rank.error]
    idle = [rank.rank for rank in done if not rank.steps]
    if idle and len(idle) < len(trace.ranks):
        return Cause("some-ranks-never-stepped", "launch", "do all ranks know that they take part?", rank=idle[0])
    return None


def _left_early(finding: Finding) -> Cause | None:
    """Only where the first rank to fail says so: the others of a rank that raised say the same, and it is no cause."""
    if "connectFullMesh failed" not in finding.message:
        return None
    look = "a rank was done before the others had met it: nothing waits"
    return Cause("left-before-the-others-joined", "sync", look)


def _missed_collective(finding: Finding, trace: Trace) -> Cause | None:
    """A rank waits for others that are done, or that wait for something else."""
    in_collective = any(exit.waits_in for exit in trace.exits.values())
    hung = finding.outcome is Outcome.TIMED_OUT and (in_collective or any(not rank.error for rank in trace.ranks))
    waited = hung or any(words in finding.message for words in PEER)
    if not waited:
        return None
    done = [rank for rank in trace.ranks if not rank.error and rank.steps]
    every = {name for rank in done for step in rank.steps for name in step.gradients}
    if any(every - rank.steps[-1].gradients.keys() for rank in done):
        look = "ranks that did not use a parameter do not reduce it, and the others wait for them"
        return Cause("waits-for-an-unused-parameter", "unused-params", look)
    counts = {len(rank.steps) for rank in done}
    if len(counts) == 1 and len(done) < len(trace.ranks) + len(trace.exits):
        look = "ranks that are done left others waiting: have all the same number of batches?"
        return Cause("ranks-differ-in-steps", "data", look)
    return Cause("collective-not-joined", "sync", "a rank waits in a collective that the others do not call")


def _raised(finding: Finding) -> Cause | None:
    names = {Outcome.ERRORED: "raised", Outcome.CRASHED: "died", Outcome.TIMED_OUT: "hung"}
    return Cause(names.get(finding.outcome, "broken"), "launch", "see the rank's log, in the run's traces")
