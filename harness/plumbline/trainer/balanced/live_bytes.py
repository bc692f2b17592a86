"""Counts the bytes of live tensors on any device, including those whose allocator does not count."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.trainer.balanced.blocks import tensors_in


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations allocate within the context, until they are freed.

    It does not count earlier storages, what an operation allocates and frees internally, or tensors on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._note(tensor, new=False)
        outputs = func(*args, **(kwargs or {}))
        for tensor in tensors_in(outputs):
            self._note(tensor, new=True)
        self.peak = max(self.peak, self.now)
        return outputs

    def _note(self, tensor: Tensor, *, new: bool) -> None:
        if tensor.is_sparse:
            return  # its indices and values are noted by themselves where they are made
        storage = tensor.untyped_storage()
        size = storage.nbytes() if new and storage.device.type != "meta" else 0
        known = self._seen.get(storage._cdata)
        if known is not None and known() is not None:
            return
        self._seen[storage._cdata] = weakref.ref(storage)
        if size:
            self.now += size
            weakref.finalize(storage, self._freed, size).atexit = False

    def _freed(self, size: int) -> None:
        self.now -= size
