"""The energy that this machine's GPUs have consumed, by the counters of their driver (NVML).

The library comes with the driver and is called directly: three functions need no package. Volta and newer GPUs have a
counter, in millijoules since the driver was loaded (NVML API reference, ``nvmlDeviceGetTotalEnergyConsumption``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

LIBRARY: Final = "libnvidia-ml.so.1"

COUNTER_PERIOD_S: Final = 0.1
"""How rarely a counter may move: every 20 to 100 ms on newer GPUs (PETSc manual, ``PetscLogGpuEnergyMeter``)."""

_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


Counters = dict[str, float]
"""Joules by the UUID of the GPU."""


class NoEnergyError(Exception):
    """No device of this machine says how much energy it has consumed; the message says why."""


class EnergyMeter:
    """The counters of all GPUs of this machine. ``load`` opens the driver's library by its name.

    Raises:
        NoEnergyError: there is no such library, or it refuses.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            self._nvml = load(LIBRARY)
        except OSError as error:
            raise NoEnergyError(f"the driver's library {LIBRARY} cannot be opened ({error})") from error
        self._insist("nvmlInit_v2")
        count = ctypes.c_uint()
        self._insist("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices = dict(map(self._device, range(count.value)))

    def read(self) -> Counters:
        """Return what each GPU has consumed since its driver was loaded; one without a counter is left out."""
        found = {}
        for uuid, handle in self._devices.items():
            millijoules = ctypes.c_ulonglong()
            if not self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                found[uuid] = millijoules.value / 1e3
        return found

    def _device(self, index: int) -> tuple[str, ctypes.c_void_p]:
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        self._insist("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._insist("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        return uuid.value.decode(), handle

    def _insist(self, name: str, *arguments: Any) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise NoEnergyError(f"the driver's {name} failed with error {code} of NVML")


@cache
def meter_of(accelerator: str) -> Callable[[], Counters]:
    """Return what reads the counters of the devices of this kind; where there are none it raises ``NoEnergyError``."""
    try:
        if accelerator != "cuda":
            raise NoEnergyError("simulated devices have no energy counter")
        return EnergyMeter().read
    except NoEnergyError as error:
        return partial(_raise, error)


def _raise(error: NoEnergyError) -> Counters:
    raise error
