"""The gradients that arrive at parameters on this rank, pass by pass, before anything is reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plumbline.check.evidence.training import Facts, segment
from plumbline.check.rank.pause import is_paused
from plumbline.check.rank.sharding import is_flat


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
    """Follows backward passes through hooks on the leaves, which run before DistributedDataParallel's.

    A pass is a call of ``torch.autograd.backward``; one inside another, as reentrant checkpointing makes them, is part
    of it. What ``torch.autograd.grad`` computes does not reach ``.grad``, and does not count.
    """

    def __init__(
        self, begins: Callable[[ArrivedGradients, Sequence[Tensor]], None], ends: Callable[[ArrivedGradients], None]
    ) -> None:
        self._begins = begins
        self._ends = ends
        self._handles: dict[int, tuple[Tensor, Any]] = {}
        self._depth = 0
        self._apart = 0
        self._count = 0
        self.current: ArrivedGradients | None = None
        self.error: Exception | None = None

    def install(self) -> None:
        """Wrap ``torch.autograd.backward`` and ``torch.autograd.grad`` for the rest of the process's life."""
        autograd: Any = torch.autograd
        backward, grad = autograd.backward, autograd.grad

        def followed_backward(*args: Any, **kwargs: Any) -> Any:
            if is_paused() or self._apart:
                return backward(*args, **kwargs)
            self._enter(_roots(args, kwargs))
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
        """Remove all hooks."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _enter(self, roots: Sequence[Tensor]) -> None:
        self._depth += 1
        if self._depth == 1:
            self.current = ArrivedGradients(self._count)
            self._count += 1
            self._begins(self.current, roots)

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self.current is not None:
            ended, self.current = self.current, None
            self._ends(ended)

    def _arrived(self, leaf: int, kept: bool, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # the leaf is part of the graph, but nothing of this pass reaches it
        if self.current is None or is_paused() or self._apart:
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


def _roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
    """Return the tensors at which a call of ``torch.autograd.backward`` begins."""
    given = args[0] if args else kwargs.get("tensors", ())
    given = given if isinstance(given, (tuple, list)) else (given,)
    return [one for one in given if isinstance(one, Tensor)]
