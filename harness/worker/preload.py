"""What the fork server imports once, and every rank would otherwise import for itself (about two seconds each)."""

from __future__ import annotations

import gc
import sys
from typing import Any

from harness.core.errors import SubjectError


def preload(locator: str) -> list[Any]:
    """Import torch, the rank's own code, and the subjects behind ``locator``; return these.

    Raises:
        SubjectError: the locator names none, its code cannot be imported or starts CUDA when it is, or this interpreter
            has no torch.
    """
    try:
        import torch
    except ImportError as error:
        raise SubjectError(
            f"its interpreter, {sys.executable}, cannot import torch ({error}): install torch there"
        ) from error
    import torch._dynamo  # the first DistributedDataParallel(...) imports it
    import torch.distributed
    import torch.nn.parallel

    from harness.subjects.load import load

    torch.set_num_threads(1)
    subjects = load(locator)
    import harness.worker.node_leader
    import harness.worker.rank  # noqa: F401
    from harness.trainer.gpus import driver_started

    if driver_started():
        raise SubjectError(
            f"to import {locator} starts CUDA, and ranks are forked after that, which CUDA does not survive: move what "
            "uses a device (.cuda(), torch.cuda.get_device_name(), …) into the function that trains"
        )
    # What is imported stays. A rank that collects garbage need not walk through it, nor copy its pages.
    gc.collect()
    gc.freeze()
    return subjects
