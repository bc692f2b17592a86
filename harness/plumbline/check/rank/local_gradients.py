"""The gradients that arrive at parameters on this rank, pass by pass, before anything is reduced over ranks."""

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

Reduce = Callable[[Tensor, Tensor], "Tensor | None"]
"""Returns what is kept of a parameter's gradient, None as long as that is not known."""


@dataclass(eq=False)
class ArrivedGradients:
    """One backward pass: the segments of what arrived at each parameter, by the parameter's id.

    ``distributed``: a DTensor arrived at some parameter, and is not among them; ``in_flat_parts`` says the same of a
    flat parameter that not all ranks share. ``whole``: gradients of parameters that are in no optimizer, until it is
    known in which pieces optimizers hold copies of them.
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

    def reduce(self, reduced: Reduce) -> None:
        """Reduce the whole gradients of which pieces are known by now."""
        for name, (parameter, gradient) in list(self.whole.items()):
            if (kept := reduced(parameter, gradient)) is not None:
                self.local[name] = kept
                del self.whole[name]


class LocalGradients:
    """Follows backward passes through hooks on the leaves, which run before DistributedDataParallel's."""

    def __init__(
        self, begins: Callable[[ArrivedGradients, Sequence[Tensor]], None], ends: Callable[[ArrivedGradients], None]
    ) -> None:
        self._begins = begins
        self._ends = ends
        self._handles: dict[int, tuple[Tensor, Any]] = {}
        self.passes = BackwardPasses(self._pass_begins, self._pass_ends)
        self.current: ArrivedGradients | None = None
        self.error: Exception | None = None

    def follow(
        self,
        leaves: Iterable[tuple[Tensor, Tensor]],
        keeps: Callable[[Tensor], bool] = lambda parameter: True,
        reduced: Reduce | None = None,
        take: Take | None = lambda gradient: gradient,
    ) -> None:
        """Hook into leaves that are not followed yet and require a gradient.

        Args:
            leaves: each parameter, and the leaf at which its local gradient arrives: mostly the parameter itself.
            keeps: says of a parameter whether its gradients are asked for; of others it is only known that they arrive.
            reduced: what is kept of gradients, where that is not one segment.
            take: returns the parameter's part of what arrives; None where other ranks hold another parameter.
        """
        arrived: Any = self._arrived if reduced is None else partial(self._arrived_whole, reduced)
        for parameter, leaf in leaves:
            known = self._handles.get(id(parameter))
            if leaf.requires_grad and leaf.is_leaf and (known is None or known[0] is not leaf):
                if known is not None:
                    known[1].remove()
                register: Any = leaf.register_hook
                who = (id(parameter), keeps(parameter), take) if reduced is None else (parameter,)
                self._handles[id(parameter)] = leaf, register(partial(arrived, *who))

    def stop(self) -> None:
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _pass_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        self.current = ArrivedGradients(number)
        self._begins(self.current, roots)

    def _pass_ends(self, number: int) -> None:
        if self.current is not None:
            ended, self.current = self.current, None
            self._ends(ended)

    def _arrived(self, leaf: int, kept: bool, take: Take | None, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # the leaf is part of the graph, but nothing of this pass reaches it
        if self.current is None or self.passes.is_apart:
            return
        if hasattr(gradient, "full_tensor"):
            self.current.distributed = True
            return  # a rank alone does not know the whole of a DTensor, and nothing may be gathered in here
        if take is None:
            self.current.in_flat_parts = True
            return
        try:
            # At once: the buffer may become .grad itself, or be used again.
            dense = gradient.to_dense() if gradient.is_sparse and kept else gradient
            arrived = segment(take(dense)) if kept else torch.zeros(0, dtype=torch.float64)
            before = self.current.local.get(leaf)
            self.current.local[leaf] = arrived if before is None else before + arrived
        except Exception as error:  # inside of the script's backward: it is for the recorder, when the pass ends
            self.error = self.error or error

    def _arrived_whole(self, reduced: Reduce, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None or self.current is None or self.passes.is_apart:
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
