"""Notes whether activation checkpoints recompute in the backward pass what their forwards computed."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.generators import generator_states, moved_generators
from plumbline.recording.observer import Observer
from plumbline.recording.parameters import parameters_of
from plumbline.recording.patching import attempt, replace, wrap
from plumbline.recording.sharding import local
from plumbline.replay import agreement
from plumbline.replay.applied_functions import follow_functions
from plumbline.replay.call import SAMPLE
from plumbline.replay.checkpointing import refuse_readers
from plumbline.replay.nested import tensors_in

NAME = "recomputation"

_CALLED_BY_GRAPHS = os.path.join("torch", "_higher_order_ops", "wrap.py")

Sample = tuple[int, Tensor]
"""The number of entries of a tensor, and a sample of them."""

Modes = tuple[tuple[nn.Module, bool], ...]
"""Modules, and whether each was in training mode."""


def recomputed_otherwise(facts: Facts) -> bool:
    """Return from the facts of a backward pass whether a recomputation in it may differ from its forward."""
    noted = facts.get(NAME) or {}
    return bool(noted.get("different") or noted.get("by_hand"))


class RecomputationObserver(Observer):
    """Compares samples of the results of a checkpoint's forward and of its recomputation.

    Facts of a backward pass: ``compared`` counts the recomputations, and ``different`` those that differ by more than
    rounding explains. Of the latter, ``generators`` has the random number generators from which one drew other numbers
    than its forward, ``modes`` says whether a module was in another mode (training or evaluation), and ``compiled``
    whether one was part of a graph of torch.compile. ``by_hand``: a module ran again outside of torch's checkpoints,
    and the backward pass drew random numbers without restoring the generators.

    Facts of a process: ``cut_off`` counts the parameters of an optimizer that have no gradient because no input of the
    reentrant checkpoint around them requires one.

    Non-reentrant checkpoints are compared by the tensors that they save, reentrant ones by their outputs.
    """

    name = NAME

    def __init__(self) -> None:
        self._modes: Modes = ()
        self._statistics: frozenset[int] = frozenset()
        self._compared = 0
        self._different: list[_Region] = []
        self._began: dict[str, str] = {}
        self._inside = 0
        self._runs_by_hand = False
        self._within: set[int] = set()
        self._cut_off: set[int] = set()
        self._reached: set[int] = set()
        self._end: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Patch the classes behind both kinds of checkpoints, so that they are followed wherever they are imported."""
        module: Any = torch.utils.checkpoint
        if hasattr(module, "_checkpoint_hook") and hasattr(module, "_CheckpointFrame"):
            wrap(module._checkpoint_hook, "__init__", self._saves)
            wrap(module._CheckpointFrame, "check_recomputed_tensors_match", self._has_saved_again)
        if hasattr(module, "CheckpointFunction"):
            forward = staticmethod(self._following(module.CheckpointFunction.forward))
            replace(module.CheckpointFunction, "forward", forward)

    def start(self) -> None:
        super().start()
        self._end = follow_functions(self._applied)

    def _applied(self, run: Callable[..., Any], kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the parameters of modules in a reentrant checkpoint that gets no input with a gradient."""
        is_checkpoint = kind is getattr(torch.utils.checkpoint, "CheckpointFunction", None)
        if not is_checkpoint or not torch.is_grad_enabled() or not self._is_following:
            return run(*args, **kwargs)
        if any(isinstance(one, Tensor) and one.requires_grad for one in args):
            return run(*args, **kwargs)
        handle = register_module_forward_pre_hook(lambda module, _: self._within.update(map(id, module.parameters())))
        try:
            return run(*args, **kwargs)
        finally:
            handle.remove()

    def before_step(self, optimizer: Optimizer) -> None:
        for one in parameters_of(optimizer) if self._within else ():
            if id(one) in self._within:
                (self._cut_off if one.grad is None else self._reached).add(id(one))

    def final_facts(self) -> Facts | None:
        cut_off = self._cut_off - self._reached
        return {"cut_off": len(cut_off)} if cut_off else None

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the modes, and the addresses of statistics that a normalisation saves for backward but does not use."""
        modules = tuple(module.modules())
        self._modes = tuple((one, one.training) for one in modules)
        normalising = (one for one in modules if isinstance(one, _NormBase))
        buffers = (buffer for one in normalising for buffer in one.buffers())
        self._statistics = frozenset(buffer.data_ptr() for buffer in buffers if not is_lazy(buffer))

    def runs_again(self, module: nn.Module) -> None:
        self._runs_by_hand = self._runs_by_hand or not self._inside

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        """Forget recomputations outside of the backward passes that count."""
        self._compared, self._different, self._runs_by_hand = 0, [], False
        self._began = generator_states()

    def backward_ends(self, number: int) -> Facts | None:
        by_hand = self._runs_by_hand and bool(moved_generators(self._began, generator_states()))
        if not self._compared and not by_hand:
            return None
        return {
            "compared": self._compared,
            "different": len(self._different),
            "generators": sorted(set().union(*(one.drawn_anew for one in self._different))),
            "modes": any(one.in_other_mode for one in self._different),
            "compiled": any(one.compiled for one in self._different),
            "by_hand": by_hand,
        }

    def stop(self) -> None:
        super().stop()
        self._end()
        self._modes, self._statistics = (), frozenset()

    @property
    def _is_following(self) -> bool:
        return self.attends and not torch.compiler.is_compiling() and not _is_traced()

    def _noted(self, region: _Region, *, differs: bool) -> None:
        self._compared += 1
        if differs:
            region.in_other_mode = any(one.training is not before for one, before in region.modes)
            self._different.append(region)

    # Non-reentrant checkpoints: a hook packs each tensor that the forward saves, and another one packs it again.

    def _saves(self, original: Callable[..., None], hook: Any, frame: Any) -> None:
        original(hook, frame)
        if self._is_following:
            attempt(self._follow, hook, frame)

    def _follow(self, hook: Any, frame: Any) -> None:
        region = frame.plumbline_region = _Region(self._modes)
        pack, unpack, recompute = hook.pack_hook, hook.unpack_hook, frame.recompute_fn

        def noting_pack(tensor: Tensor) -> Any:
            region.saved.append(attempt(self._sampled, tensor))
            return pack(tensor)

        def guarded_unpack(packed: Any) -> Any:
            refuse_readers()
            return unpack(packed)

        def noting_recompute(*args: Any) -> Any:
            before = attempt(generator_states)
            self._inside += 1
            try:
                return recompute(*args)
            finally:
                self._inside -= 1
                # A checkpoint that preserves the states restores them: a generator that has moved was drawn from anew.
                region.drawn_anew = {*moved_generators(before, attempt(generator_states))}

        hook.pack_hook, hook.unpack_hook, frame.recompute_fn = noting_pack, guarded_unpack, noting_recompute

    def _has_saved_again(self, original: Callable[..., None], frame: Any, group: Any) -> None:
        region = getattr(frame, "plumbline_region", None)
        if region is not None and self._is_following:
            attempt(self._compare, frame, region, group)
        original(frame, group)

    def _compare(self, frame: Any, region: _Region, group: Any) -> None:
        pairs = []
        for before, reference in zip(region.saved, frame.weak_holders, strict=False):
            holder = reference()
            handle = None if holder is None else holder.handles.get(group)
            if before is not None and handle is not None:
                pairs.append((before, self._sampled(frame.recomputed[group][handle])))
        self._noted(region, differs=any(map(_differ, pairs)))

    def _sampled(self, tensor: Tensor) -> Sample | None:
        """Return a sample of a saved tensor, None for parameters, and for whole numbers, which kernels do not use."""
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            return None
        if isinstance(tensor, nn.Parameter) or tensor.data_ptr() in self._statistics:
            return None
        return _sample(tensor)

    # Reentrant checkpoints: the function of the forward runs again.

    def _following(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def followed(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, self._repeated(function) if self._is_following else function, *args)

        return followed

    def _repeated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        region = _Region(self._modes)
        first: dict[str, Any] = {}

        def followed(*args: Any) -> Any:
            if not self._is_following:
                return function(*args)
            before = attempt(generator_states)
            self._inside += 1
            try:
                output = function(*args)
            finally:
                self._inside -= 1
            samples = attempt(_samples, output)
            if not first:
                first.update(before=before, samples=samples)
                return output
            drew = moved_generators(before, attempt(generator_states))
            region.drawn_anew = {*drew} & {*moved_generators(first["before"], before)}
            attempt(self._compare_outputs, region, first["samples"], samples)
            return output

        return followed

    def _compare_outputs(self, region: _Region, before: list[Sample | None], now: list[Sample | None]) -> None:
        self._noted(region, differs=len(before) != len(now) or any(map(_differ, zip(before, now, strict=True))))


class _Region:
    """One checkpointed region: samples of the tensors that it saved in order, and what its recomputation did."""

    def __init__(self, modes: Modes) -> None:
        self.modes = modes
        self.saved: list[Sample | None] = []
        self.drawn_anew: set[str] = set()
        self.in_other_mode = False
        self.compiled = _is_called_by_graph()


def _samples(output: Any) -> list[Sample | None]:
    return [_sample(one) for one in tensors_in(output)]


def _sample(tensor: Tensor) -> Sample | None:
    values = local(tensor)
    is_plain = type(values) in (Tensor, nn.Parameter) and values.layout is torch.strided
    if not is_plain or values.is_meta or values.is_quantized:
        return None
    # A mode of the script, such as the one of selective checkpointing, counts the operators that it sees.
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        return values.numel(), values.detach()[_evenly(values.shape)].clone()


def _evenly(shape: torch.Size) -> tuple[slice, ...]:
    """Return an index of at most ``SAMPLE`` evenly spread entries, which copies no others whatever the strides are."""
    left, chosen = float(SAMPLE), {}
    for index, (size, dim) in enumerate(sorted((size, dim) for dim, size in enumerate(shape))):
        most = max(1, int(left ** (1 / (len(shape) - index))))
        chosen[dim] = slice(None, None, max(1, -(-size // most)))
        left /= max(1, min(size, most))
    return tuple(chosen[dim] for dim in range(len(shape)))


def _differ(pair: tuple[Sample | None, Sample | None]) -> bool:
    """Return whether two results differ by more than rounding: fewer than half of the digits are the same."""
    one, other = pair
    if one is None or other is None:
        return False
    if one[0] != other[0]:
        return True
    dtype = one[1].dtype
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    return agreement.distance([other[1]], [one[1]]) > math.sqrt(eps)


def _is_traced() -> bool:
    """Return whether operators are recorded in a graph, as when something is compiled or exported."""
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(one) is not None for one in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))


def _is_called_by_graph() -> bool:
    """Return whether a graph of TorchDynamo called the checkpoint that begins, in place of the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_CALLED_BY_GRAPHS):
        frame = frame.f_back
    return frame is not None
