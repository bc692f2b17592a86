"""What a subject says of itself: ``@subject(...)`` over its ``train(job)``."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.core.accelerator import ACCELERATORS
from plumbline.core.backend import BACKENDS
from plumbline.core.errors import SubjectError
from plumbline.core.precision import PRECISIONS
from plumbline.core.software import Software
from plumbline.core.training_behavior import ORDINARY, TrainingBehavior
from plumbline.user_code.source_hash import sha256_of

CAPABILITIES = frozenset(
    {
        "accumulation",
        "clipping",
        "scheduler",
        "several-optimizers",
        "validation",
        "checkpoint",
        "metrics",
        "unused-parameters",
        "frozen-parameters",
        "sparse-gradients",
        "nested-outputs",
    }
)

LAUNCHES = ("rank", "node")
"""For which of them the harness starts a process that calls ``train``; below a node's, the trainer starts its ranks."""

Train = Callable[[Any], None]


@dataclass(frozen=True)
class Subject:
    """A trainer under test: its function and what it says it supports; ``precisions`` by accelerator."""

    name: str
    train: Train
    backends: tuple[str, ...]
    precisions: Mapping[str, tuple[str, ...]]
    capabilities: frozenset[str]
    library: str | None = None
    launch: str = "rank"
    behavior: TrainingBehavior = ORDINARY

    def declaration(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "backends": list(self.backends),
            "precisions": dict(self.precisions),
            "capabilities": sorted(self.capabilities),
            "software": asdict(Software.here(self.library)),
            "launch": self.launch,
            "conduct": self.behavior.declared,
            "source": _source(self.train),
            "sha256": _sha256(self.train),
        }


def _source(train: Train) -> tuple[str, int] | None:
    code = getattr(inspect.unwrap(train), "__code__", None)
    return code and (code.co_filename, code.co_firstlineno)


def _sha256(train: Train) -> str | None:
    module = sys.modules.get(getattr(inspect.unwrap(train), "__module__", ""))
    if module is None or not getattr(module, "__file__", None):
        return None
    try:
        return sha256_of(module)
    except Exception:  # what a module holds may raise whatever it likes when it is looked at
        return None


def subject(
    *,
    name: str,
    backends: Sequence[str],
    precisions: Sequence[str] | Mapping[str, Sequence[str]] = ("32",),
    capabilities: Sequence[str] = (),
    library: str | None = None,
    launch: str = "rank",
    data: str = "epochs",
    shuffle: str = "job",
    buffers: str = "shared",
    loss: str = "job",
    max_nodes: int | None = None,
    stages_per_rank: int = 1,
    max_stages: int | None = None,
) -> Callable[[Train], Train]:
    """Declare a function ``train(job)`` as a trainer under test.

    Args:
        name: what reports call it.
        backends: which of ``none``, ``dp``, ``ddp``, ``ddp2``, ``fsdp``, ``zero``, ``zero2`` it can do. Where some of
            them do less than others, declare two functions by one name, each with its backends.
        precisions: which of ``64``, ``32``, ``16``, ``bf16`` it can do; where that depends on what computes, a dict of
            them by accelerator, ``cpu`` and ``cuda``.
        capabilities: what it does beyond forward, backward, step, epochs and shuffling.
        library: the package that it tests, by the name that pip knows; reports tell its version.
        launch: ``rank``: the harness starts every process, and each of them calls ``train``. ``node``: it starts one a
            node, and the trainer starts its ranks below that one, by ``torch.multiprocessing`` or as scripts that call
            ``plumbline.current_job()``. They are recorded as if the harness had started them.
        data: ``epochs``: each sample is used once an epoch, on one rank. ``iterations``: each rank draws the samples of
            its batches by itself, with replacement if it likes, for ``job.steps`` optimizer steps of
            ``job.accumulate`` batches each. Then epochs are not judged, but that ranks draw independently.
        shuffle: ``job``: the order of samples is what ``job.shuffle`` asks for. ``always``, ``never``: it is shuffled
            anew in every epoch, or it is that of the dataset, whatever ``job.shuffle`` asks for.
        buffers: ``shared``: ranks begin each forward with the buffers of the first, as DistributedDataParallel does by
            itself. ``per-rank``: each rank keeps those that its own samples made, as with ``broadcast_buffers=False``.
            That is not what one device computes: such cells deviate.
        loss: ``job``: it trains on ``job.loss``. ``labels``: it computes its own loss, the mean cross entropy of the
            tokens in the column ``labels``, -100 left out; workloads with another loss are unsupported.
        max_nodes: on more nodes than this it does not train, and such cells are unsupported. None: on any number.
        stages_per_rank: how many stages each rank of a pipeline has; cells of models with fewer blocks are unsupported.
        max_stages: a pipeline of more stages than this it does not train. None: any number.

    Raises:
        SubjectError: a name is not one of those, or cannot stand in a test id and a file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise SubjectError(f"subject name {name!r}: use letters, digits and . _ + - so that it can name files")
    by_accelerator = precisions if isinstance(precisions, Mapping) else dict.fromkeys(ACCELERATORS, precisions)
    for what, given, known in (
        ("backend", backends, BACKENDS),
        ("accelerator", by_accelerator, ACCELERATORS),
        *(("precision", some, PRECISIONS) for some in by_accelerator.values()),
        ("capability", capabilities, CAPABILITIES),
        ("launch", (launch,), LAUNCHES),
    ):
        for value in given:
            if value not in known:
                raise SubjectError(f"subject {name!r}: there is no {what} {value!r}; there are {', '.join(known)}")

    try:
        behavior = TrainingBehavior(data, shuffle, buffers, loss, max_nodes, stages_per_rank, max_stages)
    except ValueError as error:
        raise SubjectError(f"subject {name!r}: {error}") from None

    def declare(train: Train) -> Train:
        offered = {accelerator: tuple(by_accelerator.get(accelerator, ())) for accelerator in ACCELERATORS}
        declared = Subject(name, train, tuple(backends), offered, frozenset(capabilities), library, launch, behavior)
        train.__plumbline_subject__ = declared  # type: ignore[attr-defined]
        return train

    return declare
