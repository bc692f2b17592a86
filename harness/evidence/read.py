"""Reads the evidence that ranks wrote. Nothing in it is ever executed."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from harness.core.errors import TraceError
from harness.evidence.join_shards import put_together
from harness.evidence.trace import RankTrace, Trace, unflatten
from harness.evidence.write import CHECKSUM, NO_CHECKSUM

SAVED, RESUMED = "saved", "resumed"
"""Folders, beside the evidence of the uninterrupted launch, of the launches that stop and go on."""


def read_trace(folder: Path) -> Trace:
    """Return what the launches of one cell left in ``folder``, in the order of the ranks, tensors whole.

    Raises:
        TraceError: a file is not a trace, a rank between others left none, or shards do not fit; the sentence names it.
    """
    return replace(
        _read_launch(folder),
        saved=_read_launch(folder / SAVED) if (folder / SAVED).is_dir() else None,
        resumed=_read_launch(folder / RESUMED) if (folder / RESUMED).is_dir() else None,
    )


def _read_launch(folder: Path) -> Trace:
    # A rank leaves a log in any case, and evidence only if it ends well.
    names = {file.stem.removeprefix("rank-") for file in folder.glob("rank-*")}
    if strange := sorted(name for name in names if not (name.isascii() and name.isdecimal() and len(name) < 7)):
        raise TraceError(f"{folder} has a file called rank-{strange[0][:50]!r}, which is no rank's: run the cell again")
    ranks = sorted(map(int, names))
    files = {rank: folder / f"rank-{rank}.safetensors" for rank in ranks or [0]}
    absent = [str(rank) for rank, file in files.items() if not file.is_file()]
    if absent:
        raise TraceError(f"no evidence of rank {', '.join(absent)}, which did not end well")
    return put_together(Trace(tuple(read_rank(file) for file in files.values())))


def read_rank(path: Path) -> RankTrace:
    """Return one rank's trace; what it shares out with others is in shards.

    Raises:
        TraceError: the file is missing, truncated or not a trace; the sentence names it.
    """
    try:
        content = path.read_bytes()
        _check(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        # All at once: opened and read one by one, each leaves something behind in this process (safetensors 0.8). In
        # one order always, for ties are broken by it; and copied, because what lies anywhere is summed in any order.
        loaded = load(content)
        tensors = {name: loaded[name].clone() for name in sorted(loaded)}
        return unflatten(json.loads(header["__metadata__"]["plumbline"]), tensors)
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise TraceError(
            f"{path} is not a whole trace ({type(error).__name__}: {error}); run the cell again"
        ) from error


def _check(content: bytes) -> None:
    """Hold a file against its own checksum, if it has one.

    Raises:
        ValueError: it was changed after it was written.
    """
    place = content.find(f'"{CHECKSUM}": "'.encode(), 0, 100) + len(CHECKSUM) + 5
    said = content[place : place + 8]
    if place >= 16 and re.fullmatch(rb"[0-9a-f]{8}", said):
        rest = memoryview(content)[place + 8 :]
        found = zlib.crc32(rest, zlib.crc32(content[:place] + NO_CHECKSUM.encode()))
        if found != int(said, 16):
            raise ValueError("its checksum is another: it was changed after it was written")
