"""What ``gpus=`` means: a count, a list of device indices, or all."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence

from plumbline.trainer.errors import MisconfigurationError


def parse_gpus(gpus: int | str | Sequence[int] | None, every_device: int) -> tuple[int, ...]:
    """Return the device indices that ``gpus`` asks for; an empty tuple means one cpu device.

    Args:
        gpus: A number is a count (``3``: devices 0, 1, 2). A list, or a string, holds indices (``"3"``:
            device 3 only; ``"0,"``: device 0; ``"0, 1"``). ``-1`` or ``"-1"``: all devices. ``None``, ``0``,
            ``[]``: none.
        every_device: How many devices "all" is.

    Raises:
        MisconfigurationError: It is none of these, or names a device twice.
    """
    if gpus is None:
        return ()
    if isinstance(gpus, str):
        if gpus.strip(" ") == "-1":
            return tuple(range(every_device))
        if not re.fullmatch(r" *[0-9]+ *(, *[0-9]+ *)*,? *", gpus):
            raise MisconfigurationError(
                f"gpus={gpus!r} is not a list of device indices: write '0,' or '0, 1', or '-1' for all."
            )
        gpus = [int(index) for index in re.findall(r"[0-9]+", gpus)]
    if isinstance(gpus, (list, tuple)):
        if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in gpus):
            raise MisconfigurationError(f"gpus={gpus!r} must hold device indices, each 0 or more, as in [0, 1].")
        if len(set(gpus)) < len(gpus):
            raise MisconfigurationError(f"gpus={gpus!r} names a device twice: name each device once.")
        return tuple(gpus)
    if isinstance(gpus, bool) or not isinstance(gpus, int):
        raise MisconfigurationError(
            f"gpus={gpus!r} is a {type(gpus).__name__}: give a count (2), a list ([0, 1]), a string ('0, 1') or None."
        )
    if gpus < -1:
        raise MisconfigurationError(f"gpus={gpus} is negative: give a count, or -1 for all devices.")
    return tuple(range(every_device if gpus == -1 else gpus))


_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED, what the CUDA driver answers until cuInit was called."""


def driver_started() -> bool:
    """Return whether anything in this process has started the CUDA driver, without starting it.

    The driver reads CUDA_VISIBLE_DEVICES when it is started, and does not survive a fork after that. It is started
    before torch.cuda.is_initialized() says so: by torch.cuda.is_available(), for one, and by other libraries.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_LAZY", 0))
    except OSError:
        return False  # it is not even loaded
    count = ctypes.c_int()
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) != _NOT_INITIALIZED


def make_visible(
    devices: tuple[int, ...], visible: str | None, cuda_started: bool
) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return the CUDA variables that show only ``devices``, and the indices the devices have after that.

    Args:
        devices: Indices among the devices that are visible now.
        visible: The present ``CUDA_VISIBLE_DEVICES``, or None.
        cuda_started: CUDA has read its variables already: they are left alone, and so are the indices.
    """
    if cuda_started:
        return {}, devices
    names = visible.split(",") if visible else None
    shown = ",".join(names[index].strip() if names else str(index) for index in devices)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": shown}, tuple(range(len(devices)))
