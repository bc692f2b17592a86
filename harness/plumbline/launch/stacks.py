"""Reads the Python stacks of a rank in faulthandler's format, which lists each thread's calls, innermost first."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CALL = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+")
CALLERS = (("worker/rank.py", "call_subject"), ("ranks/rank_main.py", "call"))
"""The functions that call the user's code, each as the end of its file's path and its name."""

_COLLECTIVES = "torch/distributed/distributed_c10d.py"
_WRAPPER = "torch/nn/parallel/distributed.py"
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")


@dataclass(frozen=True)
class PendingCall:
    """One call that has not returned."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        # The last two parts of the path identify a file without showing the user's home folder.
        return f"{'/'.join(self.file.split('/')[-2:])}:{self.line} in {self.name}"


def calls_of(text: str) -> tuple[PendingCall, ...]:
    """Return the calls of the training thread, innermost first, without Plumbline's own calls."""
    threads: list[list[PendingCall]] = []
    current: list[PendingCall] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append([])
            if head[1] == "Current thread":
                current = threads[-1]
        elif (found := _CALL.match(line)) and threads:
            threads[-1].append(PendingCall(found["file"], int(found["line"]), found["name"]))
    for calls in threads:
        for index, call in enumerate(calls):
            if any(call.file.endswith(file) and call.name == name for file, name in CALLERS):
                return tuple(calls[:index])
    return tuple(current or (threads[-1] if threads else ()))


def collective_of(calls: tuple[PendingCall, ...]) -> str | None:
    """Return the collective in which a rank waits, if any: the outermost function of torch.distributed.

    DistributedDataParallel runs its collectives in C++, so the stack shows only the Python call that leads to them.
    """
    for call in reversed(calls):
        if call.file.endswith(_COLLECTIVES):
            return call.name
        if call.file.endswith(_WRAPPER) and call.name == "__init__":
            return "DistributedDataParallel(…), which compares and broadcasts weights"
    if calls and calls[0].file.endswith(_WRAPPER):
        return "forward, where DistributedDataParallel broadcasts its buckets or buffers"
    if calls and calls[0].file.endswith(_BACKWARD[0]) and calls[0].name == _BACKWARD[1]:
        return "backward, in DistributedDataParallel's all-reduce of gradients"
    return None
