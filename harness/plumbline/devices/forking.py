"""Whether this process has initialised devices. Their runtimes have then read their variables, and survive no fork."""

from __future__ import annotations

import ctypes
import os

from plumbline.devices.calls import is_started, started_types
from plumbline.devices.types import device_type

_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED, the answer of the CUDA driver until cuInit is called."""


def why_no_fork() -> str | None:
    """Return the label of a type of device that anything in this process has initialised, None if there is none."""
    names = ("cuda",) if driver_started() else started_types()
    return next((device_type(name).label for name in names), None)


def is_initialised(name: str) -> bool:
    """Return whether this process has initialised devices of this type."""
    return driver_started() if name == "cuda" else is_started(name)


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
