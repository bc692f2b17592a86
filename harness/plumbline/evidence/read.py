"""Reads the trace of a launch from its ranks' files, and replaces shards and stored tensors by whole tensors.

Nothing in a file is ever executed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plumbline.core.errors import TraceError
from plumbline.evidence.rank_file import CHECKSUM, DTYPES, NO_CHECKSUM, dtype_name
from plumbline.evidence.tensor_store import FOLDER
from plumbline.evidence.tensor_store import load as load_stored
from plumbline.evidence.trace import Block, RankTrace, Shard, StoredTensor, Tensors, Trace, block_index
from plumbline.evidence.trace_file import unflatten

LARGEST_FILE = 1 << 34
"""The largest size of a file in bytes, far above that of any rank's file."""

SAVED, RESUMED = "saved", "resumed"
"""Folders beside the files of the uninterrupted launch: of the launch that stops, and of the one that continues."""


def read_trace(folder: Path) -> Trace:
    """Return the traces of the launches of one cell in ``folder``, in the order of the ranks, with whole tensors.

    Raises:
        TraceError: a file is not a trace, a rank with other files has none, or shards do not fit; the message names it.
    """
    return replace(
        _read_launch(folder),
        saved=_read_launch(folder / SAVED) if (folder / SAVED).is_dir() else None,
        resumed=_read_launch(folder / RESUMED) if (folder / RESUMED).is_dir() else None,
    )


def _read_launch(folder: Path) -> Trace:
    for place in (folder, folder / FOLDER):
        if place.is_symlink():  # a run may come from anywhere, and only files in its folder belong to it
            raise TraceError(
                f"{place} is a symbolic link, which a trace never contains: copy the run from its source again"
            )
    # A rank always leaves a log, and a trace only if it ends well.
    names = {file.stem.removeprefix("rank-") for file in folder.glob("rank-*")}
    if strange := sorted(name for name in names if not (name.isascii() and name.isdecimal() and len(name) < 7)):
        raise TraceError(
            f"{folder} has a file called rank-{strange[0][:50]!r}, which does not belong to a rank: run the cell again"
        )
    ranks = sorted(map(int, names))
    files = {rank: folder / f"rank-{rank}.safetensors" for rank in ranks or [0]}
    absent = [str(rank) for rank, file in files.items() if not file.is_file()]
    if absent:
        raise TraceError(
            f"there is no trace of rank{'s' * (len(absent) > 1)} {', '.join(absent)} in {folder}: see the logs there"
        )
    return whole_tensors(Trace(tuple(read_rank(file) for file in files.values())), folder / FOLDER)


def read_rank(path: Path) -> RankTrace:
    """Return one rank's trace; sharded tensors are not joined, and stored ones not loaded."""
    try:
        return unflatten(*read_file(path))
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise TraceError(
            f"{path} is not a complete trace ({type(error).__name__}: {error}); run the cell again"
        ) from error


def read_file(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Return the JSON values and the tensors that ``rank_file.write_file`` wrote.

    Raises:
        OSError, LookupError, TypeError, ValueError, RuntimeError, MemoryError: the file is missing, truncated or
            another one's.
    """
    content = _content(path)
    _check(content)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    values = json.loads(header.pop("__metadata__")["plumbline"])
    tensors = _tensors(header, content, 8 + size)
    # Always in the same order, because it breaks ties.
    return values, {name: tensors[name] for name in sorted(tensors)}


def _tensors(header: dict[str, Any], content: bytearray, begin: int) -> Tensors:
    """Return the tensors of a file's header. Their bytes must fill the rest of the file, without gaps or overlaps."""
    tensors = {}
    end = begin
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        count = prod(shape)
        if entry["data_offsets"] != [end - begin, end - begin + count * dtype.itemsize] or min(shape, default=0) < 0:
            raise ValueError(f"the byte range of {name!r} does not match its dtype and shape")
        # Copied, because the order of summation depends on the alignment.
        flat = torch.frombuffer(content, dtype=dtype, count=count, offset=end) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.reshape(shape).clone()
        end += count * dtype.itemsize
    if end != len(content):
        raise ValueError(f"it has {len(content)} bytes, and its header describes {end}")
    return tensors


def _content(path: Path) -> bytearray:
    """Return the content of a file. Links, which lead out of the run, and pipes, which never end, are refused."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > LARGEST_FILE:
            raise ValueError(f"it has {found.st_size} bytes; the limit is {LARGEST_FILE}")
        content = bytearray(found.st_size)
        if stream.readinto(content) != found.st_size:
            raise ValueError("it became shorter while it was read")
        return content


def _check(content: bytearray) -> None:
    place = content.find(f'"{CHECKSUM}": "'.encode(), 0, 100) + len(CHECKSUM) + 5
    recorded = content[place : place + 8]
    if place >= 16 and re.fullmatch(rb"[0-9a-f]{8}", recorded):
        rest = memoryview(content)[place + 8 :]
        found = zlib.crc32(rest, zlib.crc32(content[:place] + NO_CHECKSUM.encode()))
        if found != int(recorded, 16):
            raise ValueError("its checksum does not match: it was changed after it was written")


PARTS = ("before", "gradients", "after", "held_back")
"""The parts of a step that may be sharded."""


def whole_tensors(trace: Trace, store: Path) -> Trace:
    """Return a launch's trace with whole tensors instead of shards and references to the tensor store.

    An incomplete trace whose parts do not fit is returned unchanged: how the launch ended says why.

    Raises:
        TraceError: shards are missing, overlap, or are not parts of one tensor, or the store is damaged; the message
            names it.
    """
    values = (value for rank in trace.ranks for part in rank.tensor_sets for value in part.values())
    if not any(isinstance(value, Shard | StoredTensor) for value in values):
        return trace
    try:
        return _with_whole_tensors(trace, _Assembly(store))
    except TraceError:
        if trace.is_whole:
            raise
        return trace


def _with_whole_tensors(trace: Trace, assembly: _Assembly) -> Trace:
    steps = {rank.rank: list(rank.steps) for rank in trace.ranks}
    for number in range(max(map(len, steps.values()))):
        present = {rank: own[number] for rank, own in steps.items() if number < len(own)}
        parts: dict[str, Any] = {
            part: assembly.join({rank: getattr(step, part) for rank, step in present.items()}, f"{part}, step {number}")
            for part in PARTS
        }
        for rank, step in present.items():
            steps[rank][number] = replace(step, **{part: joined[rank] for part, joined in parts.items()})
    finals = assembly.join({rank.rank: rank.final for rank in trace.ranks if rank.final is not None}, "final")
    ranks = (
        replace(rank, steps=tuple(steps[rank.rank]), final=finals.get(rank.rank), blocks=_blocks_of(rank))
        for rank in trace.ranks
    )
    return replace(trace, ranks=tuple(ranks))


def _blocks_of(rank: RankTrace) -> dict[str, Block]:
    held = rank.steps[0].before if rank.steps else {}
    shards: dict[str, Any] = {name: value for name, value in held.items() if isinstance(value, Shard)}
    return {name: _block(shard) for name, shard in shards.items() if _block(shard)[1] != shard.shape}


class _Assembly:
    """Joins or loads each tensor, and each set of tensors, once for all ranks, so that identities are kept."""

    def __init__(self, store: Path) -> None:
        self._stored = cache(partial(load_stored, str(store)))
        self._tensors: dict[tuple[int, ...], Tensor] = {}
        self._sets: dict[tuple[int, ...], dict[int, Tensors]] = {}

    def join(self, held: Mapping[int, Tensors], where: str) -> dict[int, Tensors]:
        """Return each rank's tensors, by rank, as whole tensors."""
        key = tuple(map(id, held.values()))
        if key not in self._sets:
            self._sets[key] = {
                rank: {name: self._whole(value, rank, name, held, where) for name, value in own.items()}
                for rank, own in held.items()
            }
        return self._sets[key]

    def _whole(self, value: Any, rank: int, name: str, held: Mapping[int, Tensors], where: str) -> Any:
        if isinstance(value, StoredTensor):
            return self._stored(value)
        if not isinstance(value, Shard):
            return value
        shards: list[Any] = [held.get(other, {}).get(name) for other in value.ranks]
        key = tuple(map(id, shards))
        if key not in self._tensors or value not in shards:
            flaw = _flaw(value, rank, shards)
            if flaw:
                raise TraceError(f"{name} ({where}) is sharded over several ranks, but {flaw}; run the cell again")
            whole = torch.empty(value.space, dtype=value.values.dtype)
            for shard in shards:
                whole[block_index(_block(shard))] = shard.values
            self._tensors[key] = whole.reshape(value.shape)
        return self._tensors[key]


def _flaw(own: Shard, rank: int, shards: Sequence[Any]) -> str | None:
    """Return why the shards of ``own.ranks``, one each, do not make up the tensor of ``own``; else None."""
    if not any(shard is own for shard in shards):
        return f"rank {rank} holds neither all of it nor a block of it (a sum that was not reduced yet has no blocks)"
    for other, shard in zip(own.ranks, shards, strict=True):
        if not isinstance(shard, Shard):
            return f"rank {other} recorded no shard of it"
        if (shard.shape, shard.space, shard.values.dtype) != (own.shape, own.space, own.values.dtype):
            return f"rank {other} recorded a shard of {_kind(shard)}, rank {rank} one of {_kind(own)}"
    return _gap(own.space, tuple(map(_block, shards)))


@lru_cache(maxsize=256)
def _gap(shape: tuple[int, ...], blocks: tuple[Block, ...]) -> str | None:
    """Return what is wrong with blocks that should cover a tensor of ``shape`` exactly once; else None."""
    for begin, size in blocks:
        inside = all(0 <= b <= b + s <= n for b, s, n in zip(begin, size, shape, strict=False))
        if not (inside and len(begin) == len(size) == len(shape)):
            return f"a shard of {list(size)} at {list(begin)} exceeds its shape, {list(shape)}"
    every = prod(shape)
    missing = every - sum(prod(size) for _, size in blocks)
    if missing > 0:  # before memory is allocated for a shape that may be wrong
        return f"at least {missing} of its {every} entries are in no shard"
    times = torch.zeros(shape, dtype=torch.uint8)
    for block in blocks:
        times[block_index(block)] += 1
    twice = int((times > 1).sum())
    return f"{twice} of its {every} entries are in several shards" if twice else None


def _block(shard: Shard) -> Block:
    return shard.begin, tuple(shard.values.shape)


def _kind(shard: Shard) -> str:
    flattened = "" if shard.space == shard.shape else ", flattened"
    return f"{list(shard.shape)} {dtype_name(shard.values.dtype)}{flattened}"
