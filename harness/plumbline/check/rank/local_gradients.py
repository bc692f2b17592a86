"""Records the gradients that arrive at parameters on this rank in each pass, before any reduction over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts, segment
from plumbline.recording.backward_passes import BackwardPasses
from plumbline.recording.flat_sharding import Take
from plumbline.replay.collectives import collectives

Reduce = Callable[[Tensor, Tensor], "Tensor | None"]
"""Returns what is kept of a parameter's gradient, or None as long as that is unknown."""


@dataclass(eq=False)
class ArrivedGradients:
    """One backward pass: segments of the gradients that arrived, by the parameter's id.

    ``distributed``: a DTensor gradient arrived at some parameter, and was not recorded. ``in_flat_parts`` says the same
    of a flat parameter that not all ranks share. ``whole``: whole gradients of parameters that are in no optimizer,
    kept until it is known in which pieces optimizers hold copies of the parameters. ``written``: what ``written`` says
    of each parameter of an optimizer when the pass begins. ``sent``: how often this rank communicated in the pass.
    ``by_grad``: the pass is a call of ``torch.autograd.grad``.
    """

    number: int
    scale: float = 1.0
    local: dict[int, Tensor] = field(default_factory=dict)
    exact: dict[int, Tensor] | None = None
    native: dict[int, Tensor] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    distributed: bool = False
    in_flat_parts: bool = False
    whole: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    written: dict[int, tuple[int, int]] = field(default_factory=dict)
    sent: int = 0
    by_grad: bool = False

    def belongs_to_others(self, own: Iterable[Tensor], every: Iterable[Tensor]) -> bool:
        """Return whether gradients are known to have arrived at other optimizers' parameters only."""
        is_known = bool(self.local) and not (self.distributed or self.in_flat_parts or self.whole)
        if not is_known or not self.local.keys().isdisjoint(map(id, own)):
            return False
        return self.local.keys() <= set(map(id, every))

    def reduce(self, reduced: Reduce) -> None:
        """Reduce the whole gradients whose pieces are known by now."""
        for name, (parameter, gradient) in list(self.whole.items()):
            if (kept := reduced(parameter, gradient)) is not None:
                self.local[name] = kept
                del self.whole[name]


class RecorderHook(partial[None]):
    """A hook of the recorder, as opposed to those of the script."""


class LocalGradients:
    """Follows backward passes with hooks on the leaves, which run before those of DistributedDataParallel.

    A gradient arrives after the script's own hooks on its leaf, if they were registered before the recording. If they
    communicate, they may have reduced it over ranks, so what they were given counts as what arrived. ``reducing`` has
    the ids of such parameters.
    """

    def __init__(
        self, begins: Callable[[ArrivedGradients, Sequence[Tensor]], None], ends: Callable[[ArrivedGradients], None]
    ) -> None:
        self._begins = begins
        self._ends = ends
        self._handles: dict[int, tuple[Tensor, Any]] = {}
        self.passes = BackwardPasses(self._pass_begins, self._pass_ends)
        self.current: ArrivedGradients | None = None
        self.error: Exception | None = None
        self.reducing: set[int] = set()
        self._first: list[Any] = []
        self._given: dict[int, tuple[Tensor, int]] = {}

    def follow(
        self,
        leaves: Iterable[tuple[Tensor, Tensor]],
        keeps: Callable[[Tensor], bool] = lambda parameter: True,
        reduced: Reduce | None = None,
        take: Take | None = lambda gradient: gradient,
    ) -> None:
        """Add hooks to leaves that require a gradient and are not followed yet.

        Args:
            leaves: each parameter, and the leaf at which its local gradient arrives: usually the parameter itself.
            keeps: whether a parameter's gradients are recorded; of the others, only their arrival is noted.
            reduced: what to keep of a gradient, if this is not one segment.
            take: returns the parameter's part of the arriving gradient; None if other ranks hold another parameter.
        """
        arrived: Any = self._arrived if reduced is None else partial(self._arrived_whole, reduced)
        for parameter, leaf in leaves:
            known = self._handles.get(id(parameter))
            if leaf.requires_grad and leaf.is_leaf and (known is None or known[0] is not leaf):
                if known is not None:
                    known[1].remove()
                register: Any = leaf.register_hook
                who = (id(parameter), keeps(parameter), take) if reduced is None else (parameter,)
                is_hooked = has_gradient_hooks(leaf)
                self._handles[id(parameter)] = leaf, register(RecorderHook(arrived, *who))
                if is_hooked and reduced is None and keeps(parameter):
                    self._run_first(leaf, register(RecorderHook(self._reaches_hooks, id(parameter), take)))

    def _run_first(self, leaf: Any, handle: Any) -> None:
        self._first.append(handle)
        hooks = leaf._backward_hooks
        ordered = sorted(hooks.items(), key=lambda one: one[0] != handle.id)
        hooks.clear()  # autograd runs hooks in insertion order, which move_to_end() does not change
        hooks.update(ordered)

    def stop(self) -> None:
        for handle in (*self._first, *(handle for _, handle in self._handles.values())):
            handle.remove()
        self._handles.clear()
        self._first.clear()
        self._given.clear()
        self.reducing.clear()

    def _pass_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        self.current = ArrivedGradients(number, by_grad=self.passes.is_by_grad)
        self._begins(self.current, roots)

    def _pass_ends(self, number: int) -> None:
        if self.current is not None:
            ended, self.current = self.current, None
            self._ends(ended)

    def _reaches_hooks(self, leaf: int, take: Take | None, gradient: Tensor | None) -> None:
        """Keep what the script's hooks are given, which may change it in place."""
        if torch.compiler.is_compiling() or gradient is None or self.current is None or self.passes.is_apart:
            return
        if take is None or hasattr(gradient, "full_tensor"):
            return
        try:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._given[leaf] = segment(take(dense)), sum(collectives().values())
        except Exception as error:  # as below
            self.error = self.error or error

    def _arrived(self, leaf: int, kept: bool, take: Take | None, gradient: Tensor | None) -> None:
        if torch.compiler.is_compiling():
            return  # compiled autograd traces hooks, too, and would compile what this one computes
        if gradient is None:
            return  # the leaf is part of the graph, but this pass does not reach it
        if self.current is None or self.passes.is_apart:
            return
        if hasattr(gradient, "full_tensor"):
            self.current.distributed = True
            return  # one rank has only a part of a DTensor, and cannot gather inside a backward pass
        if take is None:
            self.current.in_flat_parts = True
            return
        try:
            # Read it at once: the buffer may become .grad itself, or be reused.
            dense = gradient.to_dense() if gradient.is_sparse and kept else gradient
            arrived = segment(take(dense)) if kept else torch.zeros(0, dtype=torch.float64)
            given, count = self._given.pop(leaf, (arrived, None))
            if count is not None and count != sum(collectives().values()):
                self.reducing.add(leaf)
                arrived = given
            before = self.current.local.get(leaf)
            self.current.local[leaf] = arrived if before is None else before + arrived
        except Exception as error:  # raised inside the script's backward: the recorder handles it when the pass ends
            self.error = self.error or error

    def _arrived_whole(self, reduced: Reduce, parameter: Tensor, gradient: Tensor | None) -> None:
        if torch.compiler.is_compiling() or gradient is None or self.current is None or self.passes.is_apart:
            return
        if hasattr(gradient, "full_tensor"):
            self.current.distributed = True
            return
        try:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            kept = reduced(parameter, dense)
            name, one = id(parameter), self.current
            if kept is not None:
                one.local[name] = kept if name not in one.local else one.local[name] + kept
            else:
                before = one.whole.get(name)
                one.whole[name] = parameter, dense.clone() if before is None else before[1] + dense
        except Exception as error:  # as above
            self.error = self.error or error


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether the script has hooks that can change a gradient before it arrives."""
    hooks: Any = parameter._backward_hooks or {}
    return any(not isinstance(one, RecorderHook) for one in hooks.values())
