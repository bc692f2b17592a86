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
from plumbline.recording.sharding import is_flat


@dataclass(eq=False)
class ArrivedGradients:
    """One backward pass: the segments of what arrived at each parameter, by the parameter's id.

    ``distributed``: a DTensor arrived at some parameter, and is not among them.
    """

    number: int
    scale: float = 1.0
    local: dict[int, Tensor] = field(default_factory=dict)
    exact: dict[int, Tensor] | None = None
    native: dict[int, Tensor] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    distributed: bool = False


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
        self, leaves: Iterable[tuple[Tensor, Tensor]], keeps: Callable[[Tensor], bool] = lambda parameter: True
    ) -> None:
        """Hook into leaves that are not followed yet and require a gradient.

        Args:
            leaves: each parameter, and the leaf at which its local gradient arrives: mostly the parameter itself.
            keeps: says of a parameter whether its gradients are asked for; of others it is only known that they arrive.
        """
        for parameter, leaf in leaves:
            known = self._handles.get(id(parameter))
            if leaf.requires_grad and leaf.is_leaf and not is_flat(leaf) and (known is None or known[0] is not leaf):
                if known is not None:
                    known[1].remove()
                register: Any = leaf.register_hook
                self._handles[id(parameter)] = leaf, register(partial(self._arrived, id(parameter), keeps(parameter)))

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

    def _arrived(self, leaf: int, kept: bool, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # the leaf is part of the graph, but nothing of this pass reaches it
        if self.current is None or self.passes.is_apart:
            return
        if hasattr(gradient, "full_tensor"):
            self.current.distributed = True
            return  # a rank alone does not know the whole of a DTensor, and nothing may be gathered in here
        try:
            # At once: the buffer may become .grad itself, or be used again.
            dense = gradient.to_dense() if gradient.is_sparse and kept else gradient
            arrived = segment(dense) if kept else torch.zeros(0, dtype=torch.float64)
            before = self.current.local.get(leaf)
            self.current.local[leaf] = arrived if before is None else before + arrived
        except Exception as error:  # inside of the script's backward: it is for the recorder, when the pass ends
            self.error = self.error or error
