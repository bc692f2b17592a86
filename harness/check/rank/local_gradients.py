"""The gradients that arrive at parameters on this rank, pass by pass, before anything is reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.check.evidence import Facts, segment
from harness.check.rank.pause import is_paused


@dataclass(eq=False)
class Pass:
    """One backward pass: the segments of what arrived at each parameter, by the parameter's id."""

    number: int
    scale: float = 1.0
    local: dict[int, Tensor] = field(default_factory=dict)
    exact: dict[int, Tensor] | None = None
    facts: Facts = field(default_factory=dict)


class LocalGradients:
    """Follows backward passes through hooks on the leaves, which run before DistributedDataParallel's.

    A pass is a call of ``torch.autograd.backward``; one inside another, as reentrant checkpointing makes them, is part
    of it. What ``torch.autograd.grad`` computes does not reach ``.grad``, and does not count.
    """

    def __init__(self, begins: Callable[[Pass], None], ends: Callable[[Pass], None]) -> None:
        self._begins = begins
        self._ends = ends
        self._handles: dict[int, Any] = {}
        self._leaves: dict[int, Tensor] = {}
        self._depth = 0
        self._apart = 0
        self._count = 0
        self.current: Pass | None = None

    def install(self) -> None:
        """Wrap ``torch.autograd.backward`` and ``torch.autograd.grad`` for the rest of the process's life."""
        autograd: Any = torch.autograd
        backward, grad = autograd.backward, autograd.grad

        def followed_backward(*args: Any, **kwargs: Any) -> Any:
            if is_paused() or self._apart:
                return backward(*args, **kwargs)
            self._enter()
            try:
                return backward(*args, **kwargs)
            finally:
                self._leave()

        def followed_grad(*args: Any, **kwargs: Any) -> Any:
            self._apart += 1
            try:
                return grad(*args, **kwargs)
            finally:
                self._apart -= 1

        autograd.backward, autograd.grad = followed_backward, followed_grad

    @property
    def count(self) -> int:
        """The number of backward passes so far."""
        return self._count

    def follow(self, leaves: Iterable[Tensor]) -> None:
        """Hook into leaves that are not followed yet and require a gradient."""
        for leaf in leaves:
            if id(leaf) not in self._handles and leaf.requires_grad and leaf.is_leaf:
                self._leaves[id(leaf)] = leaf
                register: Any = leaf.register_hook
                self._handles[id(leaf)] = register(partial(self._arrived, id(leaf)))

    def stop(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._leaves.clear()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.current = Pass(self._count)
            self._count += 1
            self._begins(self.current)

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self.current is not None:
            ended, self.current = self.current, None
            self._ends(ended)

    def _arrived(self, leaf: int, gradient: Tensor) -> None:
        if self.current is None or is_paused() or self._apart:
            return
        # At once: the buffer may become .grad itself, or be used again.
        arrived = segment(gradient.to_dense() if gradient.is_sparse else gradient)
        before = self.current.local.get(leaf)
        self.current.local[leaf] = arrived if before is None else before + arrived
