"""Where in the machine's memory a tensor lies, if other processes may have it too."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from torch import Tensor


def shared_places(tensors: Iterable[Tensor]) -> dict[int, str]:
    """Return the place of each tensor in shared memory by its number, the same in every process that has it.

    A place is the host, the mapped file and the offset in it. Tensors in a process's own memory, and on accelerators,
    are left out, as are all of them where the system has no ``/proc/self/maps``.
    """
    addresses = {
        number: tensor.data_ptr()
        for number, tensor in enumerate(tensors)
        if tensor.device.type == "cpu" and tensor.numel() and tensor.is_shared()  # type: ignore[no-untyped-call]
    }
    if not addresses:
        return {}
    mapped = list(_mappings())
    places = {}
    for number, address in addresses.items():
        for start, end, offset, file in mapped:
            if start <= address < end:
                places[number] = f"{platform.node()} {file} {offset + address - start}"
    return places


def _mappings() -> Iterable[tuple[int, int, int, str]]:
    """Yield the begin, the end, the offset and the file of each shared mapping (proc(5))."""
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                addresses, modes, offset, device, inode, *path = line.split(maxsplit=5)
                if modes.endswith("s") and inode != "0":
                    start, end = (int(number, 16) for number in addresses.split("-"))
                    yield start, end, int(offset, 16), " ".join([device, inode, *(part.strip() for part in path)])
    except OSError:
        return
