"""Writes every loss that a script differentiates, with all its digits, into the folder ``CHECK_SCRIPTS_LOSSES``.

Python imports this file at start-up if its folder is on ``PYTHONPATH``, so the script itself stays unchanged. There is
one file per process and thread that calls ``backward``, with the rank in its name if there is one.
"""

import os
import sys

FOLDER = os.environ.get("CHECK_SCRIPTS_LOSSES")


class _AfterAutograd:
    """Wrap ``torch.autograd.backward`` as soon as something has imported it."""

    def find_spec(self, name, path=None, target=None):
        """Wrap it if it has been imported; never find a module."""
        autograd = sys.modules.get("torch.autograd")
        if name.startswith("torch.") and hasattr(autograd, "backward") and "torch.nn" in sys.modules:
            sys.meta_path.remove(self)
            _wrap(autograd)


def _wrap(autograd):
    inner = autograd.backward

    def backward(tensors, *arguments, **options):
        for tensor in [tensors] if hasattr(tensors, "dim") else tensors:
            if tensor.dim() == 0 or tensor.numel() == 1:
                _write(float(tensor.detach()))
        return inner(tensors, *arguments, **options)

    autograd.backward = backward


def _write(loss):
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    if rank is None:
        distributed = sys.modules.get("torch.distributed")
        up = distributed is not None and distributed.is_available() and distributed.is_initialized()
        rank = distributed.get_rank() if up else "alone"
    with open(os.path.join(FOLDER, f"{rank}.txt"), "a", encoding="utf-8") as file:
        file.write(f"{loss!r}\n")


if FOLDER:
    sys.meta_path.insert(0, _AfterAutograd())
