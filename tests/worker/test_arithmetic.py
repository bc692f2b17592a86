"""A recorded rank on a CUDA device computes in the precision that it is judged by; a timed one like torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from plumbline.worker.assignment import Assignment

SCRIPT = """
import json, os, sys, torch
from plumbline.worker.assignment import Assignment
from plumbline.worker.rank import prepare_process
for assignment in json.loads(sys.argv[1]):
    if not os.fork():
        prepare_process(Assignment.from_json(assignment))
        matmul = torch.backends.cuda.matmul
        print(json.dumps([
            torch.backends.cudnn.allow_tf32, matmul.allow_tf32,
            matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction,
            torch.cuda.is_initialized(),
        ]))
        sys.exit()
    assert os.wait()[1] == 0
"""


ALLOWED = {
    ("cuda", None): [False, False, False, False],
    ("cuda", "socket"): [True, False, True, True],
    ("cpu", None): [True, False, True, True],
}
"""The allowed changes of a rank's arithmetic, by accelerator and by a timed rank's barrier socket."""


def test_tf32_and_16_bit_reductions_are_off_where_a_cuda_rank_is_recorded(cell_of, tmp_path):
    assignments = []
    for accelerator, barrier_socket in ALLOWED:
        cell = dataclasses.replace(cell_of("mlp", "none", "1x1"), accelerator=accelerator)
        log = str(tmp_path / "rank-0.log")
        assignments.append(
            Assignment(1, cell, 0, "gloo", ("cpu",), {}, "e", log, barrier_socket=barrier_socket).to_json()
        )
    words = [sys.executable, "-c", SCRIPT, json.dumps(assignments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [allowed for *allowed, _ in found] == list(ALLOWED.values())
    assert not any(started for *_, started in found), "CUDA is started by who trains"
