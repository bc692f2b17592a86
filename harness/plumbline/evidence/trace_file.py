"""The file of one rank of a launch: its trace as JSON values and tensors, whole or what was recorded so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from threading import Lock
from typing import Any

from plumbline.evidence.rank_file import write_file
from plumbline.evidence.trace import Evaluation, Logged, MicroBatch, RankTrace, Shard, Step, StoredTensor, Tensors

SO_FAR = ".so-far"
"""The suffix, after the process id, of the file with what a process has recorded so far."""


def so_far_path(own: str) -> str:
    """Return the file for what this process has recorded so far, beside ``own``, the file of its rank's whole trace."""
    return f"{own}.{os.getpid()}{SO_FAR}"


def write_rank(path: str, trace: RankTrace) -> None:
    """Write ``trace`` to ``path``, whole or not at all."""
    write_file(path, *flatten(trace))


class RankFile:
    """The file at ``path``, written at the end; meanwhile a file beside it has what was recorded so far.

    ``so_far`` returns what has been recorded when it is called.
    """

    def __init__(self, path: str, so_far: Callable[[], RankTrace]) -> None:
        self._path = path
        self._so_far = so_far
        self._finished = False
        self._lock = Lock()

    def write_so_far(self) -> None:
        """Write what has been recorded so far, unless ``finish`` was called."""
        with self._lock:
            if not self._finished:
                write_rank(so_far_path(self._path), self._so_far())

    def finish(self, trace: RankTrace) -> None:
        """Write the whole trace.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            self._finished = True
            write_rank(self._path, trace)
            with suppress(FileNotFoundError):
                os.unlink(so_far_path(self._path))


def flatten(trace: RankTrace) -> tuple[dict[str, Any], Tensors]:
    """Split a rank's trace into plain JSON values and a flat dict of tensors.

    Weights that did not change between two steps are kept once.
    """
    tensors: Tensors = {}
    steps: list[dict[str, Any]] = []
    previous: Tensors | None = None
    for number, step in enumerate(trace.steps):
        continues = step.before is previous
        for part in ("gradients", "after", "buffers", "held_back") + (() if continues else ("before",)):
            tensors.update({f"{number}/{part}/{name}": value for name, value in getattr(step, part).items()})
        for index, micro in enumerate(step.micro_batches):
            tensors.update({f"{number}/drawn {index}/{name}": value for name, value in micro.drawn.items()})
        steps.append(
            {
                "micro_batches": [[micro.forwards, micro.loss] for micro in step.micro_batches],
                "learning_rates": step.learning_rates,
                "skipped": step.skipped,
                "scale": step.scale,
                "continues": continues,
                "turns": step.turns,
                "alternate": step.alternate,
                "off_masters": step.off_masters,
            }
        )
        previous = step.after
    # The final weights usually are those of the last step.
    ended = previous is not None and trace.final is previous
    if trace.final is not None and not ended:
        tensors.update({f"{len(steps)}/final/{name}": value for name, value in trace.final.items()})
    tensors.update({f"{len(steps)}/final buffers/{name}": value for name, value in trace.final_buffers.items()})
    stored: dict[str, Any] = {name: value for name, value in tensors.items() if isinstance(value, StoredTensor)}
    shards: dict[str, Any] = {name: value for name, value in tensors.items() if isinstance(value, Shard)}
    return {
        "final": None if trace.final is None else "last" if ended else "own",
        "rank": trace.rank,
        "world_size": trace.world_size,
        "error": trace.error,
        "failed_at": trace.failed_at,
        "stack": trace.stack,
        "torch": trace.torch,
        "holds_nothing": trace.holds_nothing,
        "devices": trace.devices,
        "steps": steps,
        "evaluations": [astuple(evaluation) for evaluation in trace.evaluations],
        "logged": [astuple(logged) for logged in trace.logged],
        "stored": {name: [s.fingerprint, s.shape, s.dtype] for name, s in stored.items()},
        "shards": {name: [s.begin, s.shape, s.ranks] for name, s in shards.items()},
    }, {name: shards[name].values if name in shards else v for name, v in tensors.items() if name not in stored}


def unflatten(values: dict[str, Any], tensors: Tensors) -> RankTrace:
    """Undo :func:`flatten`.

    Raises:
        LookupError, TypeError, ValueError: the values are not those of a trace.
    """
    recorded = values["steps"]
    parts: dict[tuple[int, str], Tensors] = {}
    stored: dict[str, Any] = {
        name: StoredTensor(int(fingerprint), tuple(map(int, shape)), str(dtype))
        for name, (fingerprint, shape, dtype) in dict(values.get("stored", {})).items()
    }
    shards: dict[str, Any] = {
        name: Shard(tensors[name], *(tuple(map(int, numbers)) for numbers in (begin, shape, ranks)))
        for name, (begin, shape, ranks) in dict(values.get("shards", {})).items()
    }
    for key, value in sorted({**tensors, **stored, **shards}.items()):
        place, part, name = key.split("/", 2)
        parts.setdefault((int(place), part), {})[name] = value
    steps: list[Step] = []
    for number, step in enumerate(recorded):
        steps.append(
            Step(
                micro_batches=tuple(
                    MicroBatch(
                        tuple(tuple(share) for share in forwards),
                        None if loss is None else tuple(loss),
                        parts.get((number, f"drawn {index}"), {}),
                    )
                    for index, (forwards, loss) in enumerate(step["micro_batches"])
                ),
                before=steps[-1].after if step["continues"] else parts.get((number, "before"), {}),
                gradients=parts.get((number, "gradients"), {}),
                after=parts.get((number, "after"), {}),
                learning_rates=tuple(step["learning_rates"]),
                skipped=step["skipped"],
                scale=step["scale"],
                buffers=parts.get((number, "buffers"), {}),
                turns=tuple(tuple(names) for names in step.get("turns", ())),
                alternate=bool(step.get("alternate")),
                held_back=parts.get((number, "held_back"), {}),
                off_masters={str(name): float(far) for name, far in step.get("off_masters", {}).items()},
            )
        )
    finals = {None: None, "own": parts.get((len(steps), "final"), {}), "last": steps[-1].after if steps else None}
    return RankTrace(
        rank=values["rank"],
        world_size=values["world_size"],
        steps=tuple(steps),
        error=values["error"],
        failed_at=values["failed_at"],
        stack=values.get("stack", ""),
        torch=values.get("torch", ""),
        holds_nothing=values.get("holds_nothing", False),
        devices=tuple(map(str, values.get("devices", ()))),
        final=finals[values["final"]],
        final_buffers=parts.get((len(steps), "final buffers"), {}),
        evaluations=tuple(
            Evaluation(step, micro_batches, tuple(samples), training)
            for step, micro_batches, samples, training in values["evaluations"]
        ),
        logged=tuple(Logged(*logged) for logged in values["logged"]),
    )
