"""A recorded rank on a CUDA device computes in the precision that it is judged by; a timed one as torch does."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from harness.worker.assignment import Assignment

SCRIPT = """
import json, sys, torch
from harness.worker.assignment import Assignment
from harness.worker.rank import prepare_process
prepare_process(Assignment.from_json(json.loads(sys.argv[1])))
matmul = torch.backends.cuda.matmul
print(json.dumps([
    torch.backends.cudnn.allow_tf32, matmul.allow_tf32,
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction,
    torch.cuda.is_initialized(),
]))
"""


@pytest.mark.parametrize(
    ("accelerator", "gate", "allowed"),
    [
        ("cuda", None, [False, False, False, False]),
        ("cuda", "gate", [True, False, True, True]),
        ("cpu", None, [True, False, True, True]),
    ],
)
def test_tf32_and_16_bit_reductions_are_off_where_a_cuda_rank_is_recorded(
    cell_of, tmp_path, accelerator, gate, allowed
):
    cell = dataclasses.replace(cell_of("mlp", "none", "1x1"), accelerator=accelerator)
    assignment = Assignment(1, cell, 0, "gloo", ("cpu",), {}, "e", str(tmp_path / "rank-0.log"), gate=gate)
    words = [sys.executable, "-c", SCRIPT, json.dumps(assignment.to_json())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *found, started = json.loads(done.stdout)
    assert found == allowed
    assert not started, "CUDA is started by who trains"
