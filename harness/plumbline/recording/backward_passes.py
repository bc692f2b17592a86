"""Follows the backward passes of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from plumbline.recording.patching import replace
from plumbline.recording.pause import is_paused
from plumbline.recording.sharding import local


class BackwardPasses:
    """Numbers the backward passes that add to ``.grad``, and reports when each begins and ends.

    These are calls of ``torch.autograd.backward``, and direct calls of autograd's engine, as in Megatron-LM's pipeline
    schedules. A pass inside of another one, as in reentrant checkpointing, is part of it. Calls while ``paused`` do not
    count. A call of ``torch.autograd.grad`` changes no ``.grad``. It counts only if ``trains`` returns True for its
    inputs, because the script can then use its results as gradients; ``is_by_grad`` says that such a call is running.
    ``given``: the gradients that the script gives at the roots of the pass that is running, None where it gives none.
    ``has_failed``: the pass that is running or has just ended raised an exception.
    """

    def __init__(self, begins: Callable[[int, Sequence[Tensor]], None], ends: Callable[[int], None]) -> None:
        """``begins`` is called with the number of a pass and its roots, ``ends`` with the number."""
        self._begins = begins
        self._ends = ends
        self._depth = 0
        self._apart = 0
        self.count = 0
        self.given: Sequence[Tensor | None] = ()
        self.has_failed = False
        self.is_by_grad = False
        self.trains: Callable[[Any], bool] = lambda inputs: False

    def install(self) -> None:
        """Wrap ``torch.autograd.backward``, ``torch.autograd.grad`` and autograd's engine."""
        autograd: Any = torch.autograd
        backward, grad = autograd.backward, autograd.grad
        variable: Any = autograd.Variable

        def followed_backward(*args: Any, **kwargs: Any) -> Any:
            return self._followed(backward, args, kwargs)

        def followed_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return grad(outputs, inputs, *args, **kwargs)
            inputs = tuple(inputs) if isinstance(inputs, Iterator) else inputs
            given, _, creates_graph = (*args, *_NO_ARGUMENTS[len(args) :])[:3]
            roots = roots_of((outputs, kwargs.get("grad_outputs", given)), {})
            creates_graph = kwargs.get("create_graph", creates_graph)
            if not (self._depth or creates_graph or self.is_apart) and self.trains(inputs):
                self.is_by_grad = True
                try:
                    with self.counted(*roots):
                        return grad(outputs, inputs, *args, **kwargs)
                finally:
                    self.is_by_grad = False
            self._apart += 1
            try:
                return grad(outputs, inputs, *args, **kwargs)
            finally:
                self._apart -= 1

        # A compiled training step calls it, too, and must not compile the recorder.
        replace(autograd, "backward", torch._compile._disable_dynamo(followed_backward))
        replace(autograd, "grad", followed_grad)
        if (engine := getattr(variable, "_execution_engine", None)) is not None:
            replace(variable, "_execution_engine", _FollowedEngine(engine, self._followed))

    def _followed(self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.counted(*roots_of(args, kwargs)):
            return backward(*args, **kwargs)

    @property
    def is_apart(self) -> bool:
        """Whether a pass would not count now: recording is paused, or ``torch.autograd.grad`` is running."""
        return bool(self._apart) or is_paused()

    @contextmanager
    def counted(self, roots: Sequence[Tensor], given: Sequence[Tensor | None]) -> Iterator[None]:
        """Count the block as one backward pass, even if it calls ``torch.autograd.grad``."""
        if self.is_apart:
            yield
            return
        self._enter(roots, given)
        try:
            yield
        except BaseException:
            self.has_failed = self._depth == 1
            raise
        finally:
            self._leave()

    def _enter(self, roots: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
        self._depth += 1
        if self._depth == 1:
            self.count += 1
            self.has_failed = False
            self.given = given
            self._begins(self.count - 1, roots)

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.given = ()
            self._ends(self.count - 1)


_NO_ARGUMENTS: tuple[Any, ...] = (None, None, False)
"""The defaults of ``torch.autograd.grad`` for ``grad_outputs``, ``retain_graph`` and ``create_graph``."""


class _FollowedEngine:
    """Autograd's engine, whose backward passes are followed."""

    def __init__(self, engine: Any, followed: Callable[..., Any]) -> None:
        self._engine = engine
        self._followed = followed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        adds = kwargs.get("accumulate_grad", False)
        run = self._engine.run_backward
        return self._followed(run, args, kwargs) if adds else run(*args, **kwargs)


def in_backward() -> bool:
    """Return whether a backward pass is running, where a forward is only a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class ReleasedRoot:
    """The place in the graph of a root whose tensor is freed, as schedules of pipelines do after they have sent it."""

    def __init__(self, edge: GradientEdge) -> None:
        self.grad_fn, self.output_nr = edge.node, edge.output_nr

    def numel(self) -> int:
        """Return 0: no entry is left, so that the root is never taken for a loss."""
        return 0


def roots_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Tensor | None]]:
    """Return the tensors at which a call of ``torch.autograd.backward`` begins, and the gradients given there."""
    tensors, gradients = (
        _as_list(args[place] if len(args) > place else kwargs.get(name))
        for place, name in enumerate(("tensors", "grad_tensors"))
    )
    found = [pair for pair in zip_longest(tensors, gradients) if isinstance(pair[0], (Tensor, GradientEdge))]
    roots = [ReleasedRoot(root) if isinstance(root, GradientEdge) else root for root, _ in found]
    return roots, [given if isinstance(given, Tensor) else None for _, given in found]


def _as_list(given: Any) -> list[Any]:
    is_list = isinstance(given, (tuple, list)) and not isinstance(given, GradientEdge)
    return list(given) if is_list else [given]


def is_number(root: Tensor) -> bool:
    """Return whether a tensor was computed as a single number, and not only replaced by one to free its memory."""
    sizes = [math.prod(one.shape) for one in getattr(root.grad_fn, "_input_metadata", ())]
    sizes = sizes or getattr(root.grad_fn, "sizes_of_outputs", [])  # for torch 2.4, whose nodes have no shapes
    return root.numel() == 1 and (not sizes or sizes[root.output_nr] == 1)


class PassGradients:
    """Which gradients a pass changes. Other models' stay as they were, with what a script did to them."""

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self._before = {id(one): (ref(one.grad), _versions(one.grad)) for one in parameters if one.grad is not None}

    def is_changed(self, parameter: Tensor) -> bool:
        """Return whether the parameter has another gradient now, or has written to the one that it had."""
        gradient, known = parameter.grad, self._before.get(id(parameter))
        if gradient is None or known is None:
            return (gradient is None) != (known is None)
        tensor, versions = known
        return tensor() is not gradient or versions != _versions(gradient)


def _versions(gradient: Tensor) -> tuple[int, int]:
    """Return a gradient's version, and that of a DTensor's shard.

    Autograd adds to a DTensor without counting it as a change of the shard, and FSDP adds to the shard alone.
    """
    return gradient._version, local(gradient)._version
