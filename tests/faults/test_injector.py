"""Processes that the injector starts do not outlive it for long, however it ends."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "ci"
MARK = "PLUMBLINE_TEST"
LIMIT_S = 300
"""A limit for a busy machine; an idle one needs seconds."""
PROGRAMS = ("WAITS", "DEAF", "PARENT", "DAEMON", "BREEDS")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


@pytest.fixture
def mark():
    """Return the value of a variable that marks the processes that a test starts."""
    return secrets.token_hex(8)


def marked(mark, words=b""):
    """Return the processes that inherited the mark, or those whose command contains ``words``."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            inherited = f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(b"\0")
            if inherited and words in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def waited_for(condition):
    """Poll a condition; return whether it became true within the limit."""
    end = time.monotonic() + LIMIT_S
    while not (true := condition()) and time.monotonic() < end:
        threading.Event().wait(0.02)
    return bool(true)


@pytest.fixture(scope="module")
def programs():
    """Read what is left behind in another process, because other folders have modules with the same names."""
    asked = f"import json, leaving; print(json.dumps({{name: getattr(leaving, name) for name in {PROGRAMS}}}))"
    return json.loads(subprocess.check_output([sys.executable, "-c", asked], cwd=CI / "fault_lane" / "subjects"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_who_is_left_behind_ends_by_itself(name, mark, programs):
    begun = subprocess.Popen([sys.executable, "-c", programs[name], "0.5"], env={**os.environ, MARK: mark})
    assert begun.wait(LIMIT_S) == 0
    assert waited_for(lambda: not marked(mark))


def test_when_the_injector_is_killed_all_that_it_injected_ends(mark, tmp_path):
    command = [sys.executable, str(CI / "faults.py"), "--only", "leaves-breeders", "--times", "1000"]
    environment = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path)}
    injector = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        assert waited_for(lambda: marked(mark, b"os.setsid()")), "nothing breeds"
    finally:
        injector.kill()
        injector.wait()
    # Its fork servers kill all their processes: none of them has to reach the end of its life span.
    assert waited_for(lambda: not marked(mark))
