"""From a rank's Python stacks to the rank that it waits for."""

from __future__ import annotations

import pytest

from plumbline.launch.stacks import CALLERS, calls_of, collective_of
from plumbline.ranks import rank_main
from plumbline.worker import rank

TORCH = "/env/lib/python3.11/site-packages/torch"
CALLS = [(one.__code__.co_filename, one.__name__) for one in (rank.call_subject, rank_main.call)]
HARNESS = [
    (CALLS[0][0], 55, CALLS[0][1]),
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


def test_both_callers_of_users_code_are_known():
    assert all(file.endswith(end) and name == known for (file, name), (end, known) in zip(CALLS, CALLERS, strict=True))


@pytest.mark.parametrize("head", ["Current thread", "Thread"])
def test_the_thread_that_trains_is_found_among_others(head):
    late = dumped([("/usr/lib/python3.11/enum.py", 1147, "__new__")])
    trains = dumped(SUBJECT, f"{head} 0x00007f0000000000 (most recent call first):")
    assert [call.name for call in calls_of(late + trains)] == ["train"]


@pytest.mark.parametrize("text", ["", "rubbish", '  File "x", line 1 in y', "Current thread 0xzz"])
def test_what_is_no_stack_has_no_calls(text):
    assert calls_of(text) == ()
