"""Operations on devices of any type, through the type's torch module, such as ``torch.cuda`` or ``torch.xpu``.

Modules differ in what they provide. Functions return None, or do nothing, if a module lacks the call. Runtimes of
devices that this process has initialised have read their variables, and survive no fork.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from plumbline.devices.types import accelerators, device_type, module_of


def started_types() -> tuple[str, ...]:
    """Return the types of accelerator that this process has initialised."""
    return tuple(name for name in accelerators() if is_started(name))


def is_started(name: str) -> bool:
    """Return whether this process has initialised devices of this type; False if torch does not know."""
    module: Any = getattr(torch, name, None)
    is_initialized = getattr(module, "is_initialized", None)
    return name != "cpu" and is_initialized is not None and bool(is_initialized() and module.is_available())


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    _call(device, "synchronize")


def synchronize_started() -> None:
    """Wait for the current device of each type that this process has initialised."""
    for name in started_types():
        module_of(name).synchronize()


def set_current(device: torch.device) -> None:
    """Make this the device that ``torch.device(type)`` means in this process."""
    if device.type != "cpu":
        _call(device, "set_device")


def index_of(device: torch.device) -> int:
    """Return the device's index, by default the index of the current device."""
    if device.index is not None:
        return device.index
    current = getattr(module_of(device.type), "current_device", None)
    return int(current()) if current is not None else 0


def seed_all(name: str, seed: int) -> None:
    module = module_of(name)
    seeds = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
    if name != "cpu" and seeds is not None:
        seeds(seed)


def random_state(device: torch.device) -> Tensor | None:
    state: Tensor | None = _call(device, "get_rng_state")
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    module = module_of(device.type)
    module.set_rng_state(state, *_place(device))


@contextmanager
def forked(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random generators of the CPU and of these devices at the end of the context."""
    states = [(device, random_state(device)) for device in devices if device.type != "cpu"]
    with torch.random.fork_rng([]):
        try:
            yield
        finally:
            for device, state in states:
                if state is not None:
                    set_random_state(device, state)


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes this process can still allocate: free memory, and unused memory of its allocator."""
    info = _call(device, "mem_get_info")
    reserved, allocated = _call(device, "memory_reserved"), _call(device, "memory_allocated")
    if info is None or reserved is None or allocated is None:
        return None
    return int(info[0] + reserved - allocated)


def total_bytes(device: torch.device) -> int | None:
    properties = _call(device, "get_device_properties")
    return getattr(properties, "total_memory", None)


def memory_stats(device: torch.device) -> dict[str, int]:
    """Return the figures of the device's allocator, as ``torch.cuda.memory_stats`` names them."""
    return _call(device, "memory_stats") or {}


def counts_peak(device: torch.device) -> bool:
    """Return whether the device's allocator records its peak."""
    module = module_of(device.type)
    return device.type != "cpu" and hasattr(module, "max_memory_allocated")


def profiled(name: str) -> list[torch.profiler.ProfilerActivity]:
    """Return the activities that torch's profiler records in a training on devices of this type."""
    kinds = torch.profiler.ProfilerActivity
    brought = name == torch._C._get_privateuse1_backend_name()
    own = getattr(kinds, "PrivateUse1" if brought else name.upper(), None)
    return [kinds.CPU] if name == "cpu" or own is None else [kinds.CPU, own]


def _call(device: torch.device, name: str) -> Any:
    call = getattr(module_of(device.type), name, None)
    return None if call is None else call(*_place(device))


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return (device,) if device_type(device.type).indexed else ()


def mark(device: torch.device) -> Any:
    """Return a timing event in the device's stream, None if the type has no events.

    It has ``elapsed_time``, in milliseconds, and ``synchronize``, as ``torch.cuda.Event``.
    """
    module = module_of(device.type)
    kind, current = getattr(module, "Event", None), getattr(module, "current_stream", None)
    if kind is None:
        return None
    event = kind(enable_timing=True)
    event.record(*([current(device)] if current is not None else []))
    return event


def has_events(device: torch.device) -> bool:
    return hasattr(module_of(device.type), "Event")


def seed(device: torch.device, number: int) -> None:
    module = module_of(device.type)
    if hasattr(module, "manual_seed"):
        with module.device(device) if hasattr(module, "device") else nullcontext():
            module.manual_seed(number)


def max_memory_allocated(device: torch.device) -> int:
    """Return the most bytes that the device's allocator has held; see ``counts_peak``."""
    return int(_call(device, "max_memory_allocated"))


def reset_peak_memory(device: torch.device) -> None:
    _call(device, "reset_peak_memory_stats")


OutOfMemoryError: type[RuntimeError] = torch.cuda.OutOfMemoryError
"""The exception of all types of device. Since 2.5, torch calls it ``torch.OutOfMemoryError``."""


_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED, the answer of the CUDA driver until cuInit is called."""


def why_no_fork() -> str | None:
    """Return the label of a type of device that anything in this process has initialised, None if there is none."""
    names = ("cuda",) if driver_started() else started_types()
    return next((device_type(name).label for name in names), None)


def is_initialised(name: str) -> bool:
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


def compute_as_named() -> None:
    """Turn off TF32 and 16-bit reductions in this process, without starting CUDA.

    Both are less accurate than the rounding noise that the judge measures, so a correct trainer would fail. A subject
    may turn them on again; its gradients are then judged with their TF32 errors.
    https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html
    """
    # Every torch has these switches. cuDNN's is for convolutions and recurrent layers.
    torch.backends.cudnn.allow_tf32 = False
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
