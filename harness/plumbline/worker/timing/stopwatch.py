"""Times a rank's training in rounds, and adds only time stamps to its steps.

In timed launches it replaces the recorder, with the same hooks, but it keeps no tensors of the model. The number of
steps is known beforehand: the warm-up, then rounds of equal length, with a boundary after each. At a boundary the
devices finish their work, and the rank waits for all others, so that rounds do not overlap. At one boundary the parent
requests the report; the remaining steps are not observed.

Two more rounds are not timed: a step in which tensors and operations are counted, and some steps under torch's
profiler. The chunks of a pipeline are followed in the warm-up, from its second step on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import Optimizer

from plumbline.devices.freed_memory import keep_freed_memory
from plumbline.evidence.timing import BACKWARD, FORWARD, WEIGHTS, Chunk, ChunkKind, RankTiming, Round
from plumbline.evidence.trace import RankTrace
from plumbline.worker.assignment import Assignment
from plumbline.worker.recorder.recorder import StepHooks
from plumbline.worker.timing.counted_step import ExecutedFlops, TensorBytes
from plumbline.worker.timing.devices import begin_on_core, clock_of, memory_of
from plumbline.worker.timing.profiler import Collectives, StepProfile
from plumbline.worker.timing.round_barrier import REPORT, RoundBarrier
from plumbline.workloads import PerformanceWorkload, find


class Stopwatch(StepHooks):
    """Times the steps of this process, and reports them to the parent at the round barrier."""

    def __init__(self, assignment: Assignment, count: Callable[[int], None]) -> None:
        super().__init__(count)
        workload = find(assignment.cell.workload)
        assert isinstance(workload, PerformanceWorkload)
        assert assignment.barrier_socket is not None
        self._rank = assignment.rank
        self._devices = [torch.device(name) for name in assignment.devices]
        self._on_cpu = self._devices[0].type == "cpu"
        self._extent = workload.on(assignment.cell.accelerator).extent(assignment.cell.topology.devices)
        self._barrier = RoundBarrier(assignment.barrier_socket, assignment.rank)
        self._clock = clock_of(self._devices)
        self._boundaries = list(self._extent.boundaries)
        self._rounds: list[tuple[tuple[float, ...], int, list[Tensor]]] = []
        self._steps = 0
        self._tensors = TensorBytes(type(workload))
        self._collectives = Collectives(self._devices[0].type)
        self._flops = ExecutedFlops(self._devices)
        in_stages = assignment.cell.parallelism.micro_batches > 1
        self._chunks = PipelineChunks(self._clock.mark, type(workload)) if in_stages else None
        self._pipeline: tuple[tuple[Chunk, ...], ...] = ()
        self._profile: StepProfile | None = None
        if assignment.profile is not None:
            self._profile = StepProfile(assignment.profile, assignment.rank, self._devices[0].type)
        self._memory: dict[str, int] = {}
        self._begun: Any = None
        self._forwards: list[Any] = []
        self._ended: list[Any] = []
        self._samples: list[Tensor] = []
        self._waits_for_forward = True

    def install(self) -> None:
        if self._on_cpu:
            keep_freed_memory()
        super().install()

    def watch(self, model: nn.Module) -> None:
        self._tensors.watch(model)
        model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def _trace(self, rank: int) -> RankTrace:
        # What was measured has been reported already.
        error = None
        if self._steps != self._extent.steps_in_all:
            error = (
                f"it made {self._steps} optimizer steps, but its data have {self._extent.steps_in_all} whole batches: "
                "this workload needs one step per batch, in one pass over the dataset"
            )
        return RankTrace(rank=rank, world_size=self.world_size, steps=(), error=error, failed_at=None)

    def _on_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # This runs in every step, and steps may take only 150 µs: slower code here would be measurable.
        if not self._boundaries or not torch.is_grad_enabled():
            return
        index = _index(args[0]) if args else None
        if index is None:
            index = next((index for value in (*args, *kwargs.values()) if (index := _index(value)) is not None), None)
        if index is None:
            return
        self._samples.append(index)
        # Of several replicas, the one on the first device counts, which has the clock.
        if self._waits_for_forward and (self._on_cpu or index.device.type == "cpu" or index.device == self._devices[0]):
            self._waits_for_forward = False
            if self._begun is None:
                self._begin_warmup()
            self._forwards.append(self._clock.mark())
            if self._collectives.is_active:
                self._collectives.data_ends()

    def _scaled_step(self, scaler: Any, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        before = self._steps
        result = step()
        if self._steps == before:
            self.step_ends(optimizer)  # it was skipped, but its work was done
        return result

    def step_ends(self, optimizer: Optimizer) -> None:
        self._steps += 1
        self._count(self._steps)
        if not self._boundaries:
            return
        if self._begun is None:  # a stage of a pipeline that never calls the job's model
            self._begin_warmup()
        self._ended.append(self._clock.mark())
        self._waits_for_forward = True
        if self._profile is not None:
            self._profile.end_step()
        if self._chunks is not None and self._steps == 1:
            self._chunks.start()
        elif self._chunks is not None and not self._rounds:
            self._chunks.end_step()
        if self._steps == self._boundaries[0]:
            self._at_boundary(optimizer)
        else:
            self._look_for_batch()

    def _begin_warmup(self) -> None:
        self._clock.rest()
        self._begun = self._clock.mark()

    def _at_boundary(self, optimizer: Optimizer) -> None:
        times = self._clock.times([self._begun, *self._forwards, *self._ended])
        if self._chunks is not None and not self._rounds:
            self._chunks.stop()
            self._pipeline = self._chunks.steps(self._clock.times)
        del self._boundaries[0]
        self._rounds.append((times, len(self._forwards), self._samples))
        self._forwards, self._ended, self._samples = [], [], []
        looked = len(self._rounds) - 1 - self._extent.rounds
        if looked == 1:
            self._flops.stop()
            self._tensors.stop(optimizer)
            self._collectives.start()
        elif looked == 2:
            self._collectives.stop()
        command = self._barrier.wait()
        # All ranks have arrived: work here does not count in any round.
        if looked == 0 or (looked < 0 and command == REPORT):
            self._note_world()
            self._memory = memory_of(self._devices)
        if command == REPORT:
            self._report()
            return
        if looked == 0:
            self._tensors.start()
            self._flops.start()
        if self._profile is not None and len(self._rounds) == 1:
            self._profile.start()
        if self._on_cpu:
            begin_on_core(self._rank + len(self._rounds))  # trainers that take turns begin on the same cores
        self._clock.rest()
        self._begun = self._clock.mark()
        self._look_for_batch()

    def _look_for_batch(self) -> None:
        calls_model = any(forwards for _, forwards, _ in self._rounds)  # a pipeline stage may never do so
        if self._collectives.is_active and calls_model:
            self._collectives.data_begins()

    def _report(self) -> None:
        self._boundaries = []
        warmup, *rounds = (
            Round(begun=times[0], forwards=times[1 : 1 + forwards], ended=times[1 + forwards :], samples=_ids(samples))
            for times, forwards, samples in self._rounds
        )
        looked = rounds[self._extent.rounds :]
        timing = RankTiming(
            rank=self._rank,
            warmup=warmup,
            rounds=tuple(rounds[: self._extent.rounds]),
            memory=self._memory,
            tensors=self._tensors.by_metric if looked else None,
            communication=self._collectives.share_of(looked[-1].seconds) if looked else None,
            shares=self._collectives.shares_of(looked[-1].seconds) if looked else None,
            flops=self._flops.total if looked else None,
            pipeline=self._pipeline,
            devices=_uuids(self._devices),
            problems=tuple(self._profile.problems) if self._profile else (),
        )
        self._rounds = []
        self._barrier.report(timing.to_json())


def _index(batch: Any) -> Tensor | None:
    index = batch.get("index") if isinstance(batch, (dict, Mapping)) else None
    return index if isinstance(index, Tensor) else None


def _uuids(devices: Sequence[torch.device]) -> tuple[str, ...]:
    """Return the driver's names of these GPUs; empty if torch is too old to report them."""
    cuda = [torch.cuda.get_device_properties(device) for device in devices if device.type == "cuda"]
    return tuple(dict.fromkeys(f"GPU-{one.uuid}" for one in cuda if hasattr(one, "uuid")))


def _ids(samples: list[Tensor]) -> tuple[int, ...]:
    return tuple(torch.cat([index.reshape(-1).cpu() for index in samples]).tolist()) if samples else ()


Forward = tuple[int, int, int]
"""The number of the step, counted from 1, and of the stage of this rank and the micro-batch, counted from 0."""


class PipelineChunks:
    """Follows forwards and backwards between ``start`` and ``stop``; call ``end_step`` after each optimizer step.

    ``mark`` returns a mark of the clock. ``workload`` is the class with the job's ``loss``.
    """

    def __init__(self, mark: Callable[[], Any], workload: Any) -> None:
        self._mark = mark
        self._followed = (
            # Hooks would not run if the trainer leaves a call by an exception.
            (nn.Module, "__call__", self._as_forward),
            (workload, "loss", self._as_end_of_forward),
            (torch.autograd, "backward", self._as_backward),
            (torch.autograd, "grad", self._as_backward),
        )
        self._originals: list[Any] = []
        self._steps: list[list[tuple[ChunkKind, int, int, Any, Any]]] = [[]]
        self._stages: dict[nn.Module, int] = {}
        self._forwards: Counter[int] = Counter()
        self._differentiated: set[Forward] = set()
        self._inside = False
        self._read: Forward | None = None

    def start(self) -> None:
        for owner, name, follow in self._followed:
            self._originals.append(getattr(owner, name))
            setattr(owner, name, follow(getattr(owner, name)))

    def end_step(self) -> None:
        self._steps.append([])
        self._forwards.clear()

    def stop(self) -> None:
        for (owner, name, _), original in zip(self._followed, self._originals, strict=False):
            setattr(owner, name, original)
        self._originals = []

    def steps(self, times: Callable[[Sequence[Any]], Sequence[float]]) -> tuple[tuple[Chunk, ...], ...]:
        """Return the chunks of each completed step; ``times`` converts marks to seconds."""
        steps = self._steps[:-1]
        moments = iter(times([mark for step in steps for *_, begun, ended in step for mark in (begun, ended)]))
        return tuple(
            tuple(Chunk(kind, stage, number, next(moments), next(moments)) for kind, stage, number, *_ in step)
            for step in steps
        )

    def _as_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            stage = self._stages.setdefault(module, len(self._stages))
            forward = (len(self._steps), stage, self._forwards[stage])
            self._forwards[stage] += 1
            self._inside, begun = True, self._mark()
            try:
                with saved_tensors_hooks(lambda tensor: (forward, tensor), self._unpack):
                    return call(module, *args, **kwargs)
            finally:
                self._inside = False
                self._steps[-1].append((FORWARD, *forward[1:], begun, self._mark()))

        return followed

    def _as_end_of_forward(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def followed(*args: Any) -> Tensor:
            result = loss(*args)
            step = self._steps[-1]
            if not self._inside and step and step[-1][0] == FORWARD:
                step[-1] = (*step[-1][:-1], self._mark())
            return result

        return followed

    def _as_backward(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return differentiate(*args, **kwargs)
            self._inside, self._read, begun = True, None, self._mark()
            try:
                return differentiate(*args, **kwargs)
            finally:
                self._inside = False
                self._note_backward(begun, self._mark())

        return followed

    def _unpack(self, saved: tuple[Forward, Tensor]) -> Tensor:
        self._read, tensor = saved
        return tensor

    def _note_backward(self, begun: Any, ended: Any) -> None:
        if self._read is None:  # it was not for a stage
            return
        _, stage, number = self._read
        kind: ChunkKind = WEIGHTS if self._read in self._differentiated else BACKWARD
        self._differentiated.add(self._read)
        step = self._steps[-1]
        if kind == WEIGHTS and step and step[-1][:3] == (kind, stage, number):
            begun = step.pop()[3]  # several calls for weights are one chunk
        step.append((kind, stage, number, begun, ended))
