"""From a rank's Python stacks to whom it waits for."""

from __future__ import annotations

import pytest

from plumbline.launch.stacks import calls_of, collective_of

TORCH = "/env/lib/python3.11/site-packages/torch"
HARNESS = [
    ("/here/harness/plumbline/worker/rank.py", 55, "call"),
    ("/here/harness/plumbline/worker/server.py", 130, "_fork"),
]
SUBJECT = [("/home/somebody/mine.py", 7, "train"), *HARNESS]


def dumped(calls, head="Current thread 0x00007fecfe272b80 (most recent call first):"):
    return "\n".join([head, *(f'  File "{file}", line {line} in {name}' for file, line, name in calls), ""])


C10D = "distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("innermost", "collective"),
    [
        ([(C10D, 2810, "all_reduce"), ("distributed/c10d_logger.py", 83, "wrapper")], "all_reduce"),
        ([(C10D, 1, "all_gather"), (C10D, 2, "all_gather_object")], "all_gather_object"),
        ([("distributed/rendezvous.py", 9, "f"), (C10D, 3, "init_process_group")], "init_process_group"),
        ([("autograd/graph.py", 979, "_engine_run_backward"), ("_tensor.py", 623, "backward")], "backward"),
        ([("nn/parallel/distributed.py", 1500, "_pre_forward"), ("nn/modules/module.py", 1, "f")], "forward"),
        ([("nn/modules/linear.py", 1, "forward")], None),
        ([], None),
    ],
)
def test_the_collective_is_named(innermost, collective):
    calls = calls_of(dumped([*((f"{TORCH}/{file}", line, name) for file, line, name in innermost), *SUBJECT]))
    assert len(calls) == len(innermost) + 1, "the harness's own calls are left out"
    found = collective_of(calls)
    assert found == collective or (collective and found and found.startswith(collective))


def test_the_thread_that_trains_is_read_and_no_home_is_named():
    other = dumped([("/x/threading.py", 1, "wait")], "Thread 0x00007f0000000000 (most recent call first):")
    calls = calls_of(other + dumped(SUBJECT))
    assert [str(call) for call in calls] == ["somebody/mine.py:7 in train"]
    assert not any("/home" in str(call) for call in calls)


@pytest.mark.parametrize("text", ["", "rubbish", '  File "x", line 1 in y', "Current thread 0xzz"])
def test_what_is_no_stack_has_no_calls(text):
    assert calls_of(text) == ()
