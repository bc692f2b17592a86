"""Imports what ranks need, once, in the fork server: a rank that imported torch itself would take two seconds."""

from __future__ import annotations

import gc
import sys
from typing import Any

from plumbline.core.errors import SubjectError


def preload(locator: str) -> list[Any]:
    """Import torch, the rank's code and the subjects behind ``locator``; return the subjects.

    Raises:
        SubjectError: This interpreter has no torch, or the subjects cannot be imported without starting CUDA.
    """
    try:
        import torch
    except ImportError as error:
        raise SubjectError(
            f"its interpreter, {sys.executable}, cannot import torch ({error}). Install torch there."
        ) from error
    import torch._dynamo  # the first DistributedDataParallel(...) imports it
    import torch.distributed
    import torch.nn.parallel

    from plumbline.subjects.load import load

    torch.set_num_threads(1)
    subjects = load(locator)
    import plumbline.worker.node_leader
    import plumbline.worker.rank  # noqa: F401
    from plumbline.trainer.gpus import driver_started

    if driver_started():
        raise SubjectError(
            f"importing {locator} starts CUDA, which does not survive the fork of the ranks. Move the code that uses a "
            "device (.cuda(), torch.cuda.get_device_name(), …) into the training function."
        )
    # The garbage collection of a rank then skips what was imported, and does not copy its pages.
    gc.collect()
    gc.freeze()
    return subjects
