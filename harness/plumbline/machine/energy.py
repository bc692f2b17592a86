"""Reads the energy that this machine's GPUs have used from the driver's counters (NVML, on Volta and newer)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"

COUNTER_PERIOD_S: Final = 0.1
"""Newer GPUs update a counter every 20 to 100 ms (PETSc manual, ``PetscLogGpuEnergyMeter``)."""

_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


Counters = dict[str, float]  # joules by the UUID of the GPU


class NoEnergyError(Exception):
    """Energy cannot be read on this machine; the message says why."""


class EnergyMeter:
    """The energy counters of all GPUs. ``load`` opens the driver's library by name.

    Raises:
        NoEnergyError: The library cannot be opened, or fails.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._nvml = load(LIBRARY)
        except OSError as error:
            raise NoEnergyError(f"the driver's library {LIBRARY} cannot be opened ({error})") from error
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = dict(map(self._device, range(count.value)))

    def read(self) -> Counters:
        """Return the joules that each GPU has used since its driver was loaded, without GPUs that have no counter."""
        found = {}
        for uuid, handle in self._devices.items():
            millijoules = ctypes.c_ulonglong()
            if not self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                found[uuid] = millijoules.value / 1e3
        return found

    def _device(self, index: int) -> tuple[str, ctypes.c_void_p]:
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        return uuid.value.decode(), handle

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise NoEnergyError(f"NVML's {name} failed with error {code}")


@cache
def meter_of(accelerator: str) -> Callable[[], Counters]:
    """Return a function that reads the energy counters; it raises ``NoEnergyError`` if there are none."""
    try:
        if accelerator == "cpu":
            raise NoEnergyError("simulated devices have no energy counter")
        if accelerator != "cuda":
            raise NoEnergyError("energy is measured on NVIDIA GPUs only")
        return EnergyMeter().read
    except NoEnergyError as error:
        why = error

    def refuse() -> Counters:
        raise why

    return refuse
