"""``@subject(...)``: declares a trainer under test."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plumbline.core.backend import BACKENDS
from plumbline.core.errors import SubjectError
from plumbline.core.precision import PRECISIONS
from plumbline.core.software import Software
from plumbline.core.training_behavior import EVERY_OTHER, ORDINARY, TrainingBehavior
from plumbline.devices.types import accelerators
from plumbline.user_code import sha256_of

CAPABILITIES = frozenset(
    {
        "accumulation",
        "clipping",
        "scheduler",
        "several-optimizers",
        "matrix-optimizer",
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
"""The harness starts a process per rank or per node. With ``node``, the trainer starts its own ranks."""

Train = Callable[[Any], None]


@dataclass(frozen=True)
class Subject:
    """A trainer under test: its function and its declarations.

    ``precisions`` are by accelerator, see :mod:`plumbline.core.training_behavior`.
    """

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
    except Exception:  # inspecting a module's contents can raise anything
        return None


def subject(
    *,
    name: str,
    backends: Sequence[str],
    precisions: Sequence[str] | Mapping[str, Sequence[str]] = ("32",),
    capabilities: Collection[str] = (),
    library: str | None = None,
    launch: str = "rank",
    data: str = "epochs",
    shuffle: str = "job",
    buffers: str = "shared",
    loss: str = "job",
    model: str = "job",
    gradients: str = "weights",
    max_nodes: int | None = None,
    stages_per_rank: int = 1,
    max_stages: int | None = None,
    divides: Collection[str] = (),
    devices: str = "shared",
    batches: str = "any",
) -> Callable[[Train], Train]:
    """Declare a function ``train(job)`` as a trainer under test.

    Args:
        name: its name in reports.
        backends: the backends that it supports: ``none``, ``dp``, ``ddp``, ``ddp2``, ``fsdp``, ``zero``, ``zero2``, …
            If some of them support less than others, declare two functions with the same name, each for its backends.
        precisions: the precisions that it supports: ``64``, ``32``, ``16``, ``bf16``, ``bf16-true``, ``bf16-master``.
            If they depend on the accelerator, give a dict by ``cpu``, ``cuda`` and other types of torch's devices, with
            ``*`` for all types without a key. On other types, the trainer is unsupported.
        capabilities: what it supports beyond forward, backward, step, epochs and shuffling.
        library: the name under which pip knows the package under test. Reports show its version.
        launch: ``rank``: the harness starts a process per rank, which calls ``train``. ``node``: it starts a process
            per node, and the trainer starts its ranks from there, with ``torch.multiprocessing`` or as scripts that
            call ``plumbline.current_job()``. Both are recorded in the same way.
        data: ``epochs``: each sample is used once per epoch, on one rank. ``iterations``: each rank draws its own
            samples, with or without replacement, for ``job.steps`` optimizer steps of ``job.accumulate`` batches each.
            The judge then checks that ranks draw independently, instead of checking epochs.
        shuffle: ``job``: as ``job.shuffle`` says. ``always``: every epoch has a new order. ``never``: samples come in
            the order of the dataset.
        buffers: ``shared``: all ranks begin each forward with the first rank's buffers, as DistributedDataParallel
            does. ``per-rank``: each rank keeps its own buffers, which depend on its own samples, as with
            ``broadcast_buffers=False``. Such cells deviate, because one device computes other buffers.
        loss: ``job``: it uses ``job.loss``. ``labels``: it computes its own loss, the mean cross entropy of the tokens
            in the column ``labels`` that are not -100. Workloads with another loss are unsupported.
        model: ``job``: it trains any model. ``adapters``: it trains adapters of frozen layers, with its own
            implementation of adapters. Workloads without adapters are unsupported.
        gradients: the dtype in which gradients of micro-batches and of ranks are summed if the precision is
            ``bf16-master``. ``weights``: the dtype of the model's weights, as in ``.grad`` and with
            DistributedDataParallel. ``float32``: as with DeepSpeed's ``grad_accum_dtype`` or Megatron's
            ``accumulate_allreduce_grads_in_fp32``.
        max_nodes: the maximum number of nodes. None: any number.
        stages_per_rank: the number of pipeline stages per rank.
        max_stages: the maximum number of pipeline stages. None: any number.
        divides: numbers that must be divisible by the number of ranks over which a model, a sequence or experts are
            divided: ``heads`` of attention, ``features`` of linear layers, ``experts``. Other cells are not trained.
        devices: ``shared``: several of its ranks can share a device (``--oversubscribe``). ``own``: each rank needs its
            own. On CUDA, ranks that share a device communicate over gloo. Over gloo, torch can neither send CUDA
            tensors from one rank to another nor gather them into one tensor.
        batches: ``equal``: all batches must have the same size, because the stages of a pipeline exchange tensors of
            fixed shapes. Workloads with a smaller last batch are unsupported.

    Raises:
        SubjectError: a value is unknown, or the name is not suitable for test ids and file names.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise SubjectError(f"subject name {name!r}: use only letters, digits and . _ + -, because it names files")
    by_accelerator = precisions if isinstance(precisions, Mapping) else {EVERY_OTHER: precisions}
    for what, given, known in (
        ("backend", backends, BACKENDS),
        ("accelerator", by_accelerator, ("cpu", *accelerators(), EVERY_OTHER)),
        *(("precision", some, PRECISIONS) for some in by_accelerator.values()),
        ("capability", capabilities, CAPABILITIES),
        ("launch", (launch,), LAUNCHES),
    ):
        for value in given:
            if value not in known:
                raise SubjectError(f"subject {name!r}: unknown {what} {value!r}; choose from {', '.join(known)}")

    try:
        behavior = TrainingBehavior(
            data,
            shuffle,
            buffers,
            loss,
            model,
            gradients,
            max_nodes,
            stages_per_rank,
            max_stages,
            tuple(sorted(divides)),
            devices,
            batches,
        )
    except ValueError as error:
        raise SubjectError(f"subject {name!r}: {error}") from None

    def declare(train: Train) -> Train:
        offered = {accelerator: tuple(some) for accelerator, some in by_accelerator.items()}
        declared = Subject(name, train, tuple(backends), offered, frozenset(capabilities), library, launch, behavior)
        train.__plumbline_subject__ = declared  # type: ignore[attr-defined]
        return train

    return declare
