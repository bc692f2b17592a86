"""Collects all trainers of this suite in one module, so that one fork server serves them all."""

from __future__ import annotations

import importlib
from pathlib import Path

NOT_TRAINERS = {
    "base_trainer",
    "conftest",
    "everybody",
    "expect",
    "expert_trainer",
    "loop",
    "master_trainer",
    "mesh_trainer",
    "model_blocks",
    "otherwise",
    "reporting",
    "resumable",
    "resumable_shards",
    "score",
    "sequence_trainer",
    "shard_trainer",
    "stage_trainer",
    "tensor_trainer",
    "three_dimensional_trainer",
    "test_detection",
}

for _file in sorted(Path(__file__).parent.glob("*.py")):
    if _file.stem not in NOT_TRAINERS:
        for _name, _value in vars(importlib.import_module(_file.stem)).items():
            if hasattr(_value, "expectation"):
                _value.expectation_file = "right" if _value.expectation.good else _file.stem
                globals()[_name] = _value
