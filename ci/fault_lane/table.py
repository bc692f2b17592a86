"""The faults of ranks, by family."""

from __future__ import annotations

from fault_lane.cells import HANGING, Must, cell_fault, log_ends_with, said_of_every_rank
from plumbline.core.outcome import Outcome

E, C, T, P = Outcome.ERRORED, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.PASSED

RAISES = [
    cell_fault(
        1,
        "raising.py",
        "raises",
        Must(
            E,
            ("RuntimeError: the third batch is broken",),
            1,
            2,
            (log_ends_with("in one_rank"), said_of_every_rank("rank 0: ")),
        ),
        quick=True,
    ),
    cell_fault(1, "raising.py", "raises", Must(E, ("the third batch is broken",), 0, 2), topology="1x1"),
    cell_fault(
        1,
        "raising.py",
        "every-rank-raises",
        Must(E, ("ValueError: rank [01] does not like it", "rank 0: ", "rank 1: "), None, 2),
        quick=True,
    ),
    cell_fault(1, "raising.py", "asks-to-exit", Must(E, ("SystemExit",), 1, 2)),
    cell_fault(1, "raising.py", "raises-interrupt", Must(E, ("KeyboardInterrupt",), 1, 2)),
    cell_fault(1, "raising.py", "raises-at-length", Must(E, ("RuntimeError: word word",), 1, 2)),
    cell_fault(1, "raising.py", "raises-the-unspeakable", Must(E, ("UnspeakableError",), 1, 2)),
    cell_fault(1, "raising.py", "raises-rubbish", Must(E, ("RuntimeError",), 1, 2)),
]

DIES = [
    cell_fault(2, "dying.py", "is-killed", Must(C, ("signal 9", "SIGKILL"), 1, 2), quick=True),
    cell_fault(2, "dying.py", "is-killed", Must(C, ("SIGKILL",), 0, 2), topology="1x1"),
    cell_fault(2, "dying.py", "segfaults", Must(C, ("SIGSEGV", "in segfaults"), 1, 2), quick=True),
    cell_fault(2, "dying.py", "aborts", Must(C, ("SIGABRT", "in aborts"), 1, 2)),
    cell_fault(2, "dying.py", "loses-its-file", Must(C, ("SIGBUS", "/dev/shm"), 1, 2)),
    cell_fault(2, "dying.py", "exits-with-0", Must(C, ("exit code 0",), 1, 2), quick=True),
    cell_fault(2, "dying.py", "exits-with-3", Must(C, ("exit code 3",), 1, 2)),
    cell_fault(2, "dying.py", "wants-too-much-memory", Must(E, ("can't allocate memory",), 1, 2)),
    cell_fault(2, "dying.py", "fills-the-memory", Must(C, ("SIGKILL", "out of memory"), 1, 2)),
    cell_fault(2, "dying.py", "dies-before-the-group", Must(C, ("SIGKILL",), 1, 0)),
]

HANGS = [
    cell_fault(
        3,
        "hanging.py",
        "hangs",
        Must(T, ("3 s", "in for_ever", "rank 0: .*all-reduce", "rank 1: "), 1, 2),
        limit=HANGING,
        quick=True,
    ),
    cell_fault(
        3,
        "hanging.py",
        "every-rank-hangs",
        Must(T, ("3 s", "rank 0: .*for_ever", "rank 1: .*for_ever"), None, 2),
        limit=HANGING,
    ),
    cell_fault(
        3,
        "hanging.py",
        "calls-another-collective",
        Must(T, ("rank 0: .*all-reduce", "rank 1: .*barrier"), None, 2),
        limit=HANGING,
        quick=True,
    ),
    cell_fault(
        3,
        "hanging.py",
        "gathers-alone",
        Must(T, ("rank 0: .*all-reduce", "rank 1: .*all_gather_object"), None, 2),
        limit=HANGING,
    ),
    cell_fault(
        3,
        "hanging.py",
        "waits-for-work",
        Must(T, ("rank 0: .*all-reduce", "rank 1: .*in waits_for_work"), None, 2),
        limit=HANGING,
    ),
    cell_fault(3, "hanging.py", "is-stopped", Must(T, ("SIGSTOP", "in stops"), 1, 2), limit=HANGING),
    cell_fault(3, "hanging.py", "hangs-in-c", Must(T, ("in holds_the_lock",), 1, 2), limit=HANGING),
    cell_fault(3, "hanging.py", "hears-nothing", Must(T, ("no stack",), 1, 2), limit=HANGING),
    cell_fault(
        3,
        "hanging.py",
        "joins-nobody",
        Must(T, ("rank 0: .*init_process_group", "rank 1: .*for_ever"), None, 0),
        limit=HANGING,
    ),
    cell_fault(3, "hanging.py", "hangs-in-a-destructor", Must(T, ("in __del__",), None, 6), limit=HANGING),
    cell_fault(3, "hanging.py", "hangs-on-its-way-out", Must(P)),
]

STAGES = [
    cell_fault(1, "staged.py", "a-stage-raises", Must(E, ("a gradient is broken",), 1, 2), backend="balanced"),
    cell_fault(2, "staged.py", "a-stage-is-killed", Must(C, ("SIGKILL",), 1, 2), backend="balanced"),
    cell_fault(3, "staged.py", "a-stage-hangs", Must(T, ("in for_ever",), 1, 2), limit=HANGING, backend="balanced"),
]

LEAVES = [
    cell_fault(4, "leaving.py", "ignores-sigterm", Must(T, ("in ignores_term",), 1, 2), limit=HANGING),
    cell_fault(4, "leaving.py", "leaves-a-child", Must(P), quick=True),
    cell_fault(4, "leaving.py", "leaves-a-deaf-child", Must(P)),
    cell_fault(4, "leaving.py", "leaves-a-grandchild", Must(P)),
    cell_fault(4, "leaving.py", "leaves-a-daemon", Must(P), quick=True),
    cell_fault(4, "leaving.py", "leaves-breeders", Must(P)),
    cell_fault(4, "leaving.py", "dies-and-leaves-a-daemon", Must(C, ("SIGKILL",), 1, 2)),
]

FLOODS = [
    cell_fault(
        5,
        "flooding.py",
        name,
        Must(E, ("after the flood",), 1, 2, (log_ends_with("after the flood"),)),
        quick=name.endswith("stdout"),
    )
    for name in ("floods-stdout", "floods-stderr", "floods-with-rubbish", "floods-one-line")
] + [
    cell_fault(5, "flooding.py", "floods-and-trains", Must(P)),
    cell_fault(5, "flooding.py", "leaves-a-flood", Must(P)),
]

POLLUTES = [
    cell_fault(6, "polluting.py", "pollutes-exit", Must(E, ("SystemExit",), 1, 2)),
    *(
        cell_fault(6, "polluting.py", f"pollutes-{name}", Must(P), quick=name == "torch")
        for name in ("directory", "environment", "torch", "generators", "limits", "output")
    ),
    # On one rank only: without its descriptors, a rank cannot communicate.
    cell_fault(6, "polluting.py", "pollutes-descriptors", Must(P), topology="1x1"),
    cell_fault(6, "polluting.py", "pollutes-standard-descriptors", Must(P), topology="1x1"),
    cell_fault(6, "polluting.py", "pollutes-signals", Must(P)),
    cell_fault(6, "polluting.py", "pollutes-classes", Must(E, ("polluted",), 1, 2)),
    cell_fault(6, "polluting.py", "pollutes-group", Must(P)),
]  # fmt: skip

OF_RANKS = [*RAISES, *DIES, *HANGS, *STAGES, *LEAVES, *FLOODS, *POLLUTES]
