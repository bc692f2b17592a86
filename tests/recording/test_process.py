"""Listeners of a process learn of its end, and of processes forked or spawned from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing
import os
import sys
from plumbline.recording.process import follow_processes

FIRST = os.getpid()

def say(what):
    print(what, "there" if os.getpid() == FIRST else "elsewhere", flush=True)

follow_processes(lambda: say("ends"), lambda: say("forked"), lambda: say("begins"))

if __name__ == "__main__":
    if sys.argv[1] == "os":
        child = os.fork()
        if child:
            os.waitpid(child, 0)
    else:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=print, args=("runs",), kwargs={"flush": True})
        child.start()
        child.join()
    say("over")
"""


@pytest.mark.parametrize(
    ("how", "child"),
    [
        ("fork", ["forked elsewhere", "begins elsewhere", "runs", "ends elsewhere"]),
        ("spawn", ["runs", "ends there"]),  # another interpreter is its own first process
        ("os", ["forked elsewhere", "over elsewhere", "ends elsewhere"]),
    ],
)
def test_the_end_of_each_process_is_told(tmp_path, how, child):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "torch").mkdir()  # there is no training here, and importing it takes seconds
    for name in ("__init__", "distributed"):
        (tmp_path / "torch" / f"{name}.py").touch()
    words = [sys.executable, "script.py", how]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    before, after = said[: said.index("over there")], said[said.index("over there") + 1 :]
    assert list(dict.fromkeys(before)) == child  # an end may be reported twice
    assert set(after) == {"ends there"}
