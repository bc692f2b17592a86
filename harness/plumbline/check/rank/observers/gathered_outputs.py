"""Notes outputs of other ranks that a loss uses as constants, because a collective without a gradient returned them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.loss_terms import MOST_NODES
from plumbline.recording.observer import Observer
from plumbline.recording.patching import attempt, wrap
from plumbline.recording.pause import paused
from plumbline.replay.alias import CallOutputs
from plumbline.replay.applied_functions import follow_functions

_SAVED = (
    "_saved_self", "_saved_other", "_saved_mat1", "_saved_mat2", "_saved_batch1", "_saved_batch2", "_saved_x1",
    "_saved_x2",
)  # fmt: skip
"""Attributes with the tensors that nodes of products, quotients and distances save for the backward pass."""

_CALL: Any = CallOutputs._backward_cls

MOST_CALLS = 8
"""The most calls that are kept until the next backward pass. A loss gathers a few tensors, but evaluations may gather
without end."""

LEAST_ENTRIES = 4
"""The nonzero entries that a row needs: rows with fewer may be multiples of each other by chance."""

ALONG = 1 - 1e-5
"""Rows with at least this cosine count as multiples of each other: rounding to bfloat16 leaves 1 - 2e-6."""


@dataclass(frozen=True, eq=False)
class _Gathered:
    """One call: its name, what this rank gave, the node that computed it, and what it received from other ranks."""

    call: str
    own: Tensor
    node: int
    parts: Sequence[Tensor]

    def rows_of_others(self) -> Iterator[Tensor]:
        """Yield the first row of each part, unless this rank has the same row, or the part requires a gradient.

        Such a gradient belongs to another rank, to which a pipeline's stage sends it.
        """
        for part in (one.detach() for one in self.parts if not one.requires_grad):
            row = part.reshape(-1, part.shape[-1])[0]
            if int((row != 0).sum()) >= LEAST_ENTRIES and not _has_row(self.own, row):
                yield row


class GatheredOutputObserver(Observer):
    """Follows ``all_gather`` and ``batch_isend_irecv`` of tensors with a graph: what they return has none.

    ``all_gather_into_tensor`` refuses such tensors. ``all_reduce`` over all ranks, which changes such tensors in place,
    is followed as well.

    Facts of a process with such calls: ``used``, the names of those whose results the graph of a loss saves as an
    operand; ``reduced``, whether it computes with a tensor that ``all_reduce`` changed, and ``reduced_number`` the same
    for a tensor with one entry, such as a loss; ``exchanges``, whether outputs are gathered or reduced. Calls with
    gradients disabled are intended, and not followed. The search does not look into modules with parameters. Calls in a
    custom ``autograd.Function`` usually have a backward.
    """

    name = "gathered-outputs"

    def __init__(self) -> None:
        self._gathered: deque[_Gathered] = deque(maxlen=MOST_CALLS)
        self._reduced: deque[tuple[Any, str]] = deque(maxlen=MOST_CALLS)
        self._used: set[str] = set()
        self._found: set[str] = set()
        self._has_calls = False
        self._has_hooks = False
        self._in_functions = 0
        self._end: Callable[[], None] = lambda: None

    def install(self) -> None:
        if torch.distributed.is_available():
            wrap(torch.distributed, "all_gather", partial(self._around, self._note_gathering))
            wrap(torch.distributed, "batch_isend_irecv", partial(self._around, self._note_messages))
            wrap(torch.distributed, "all_reduce", partial(self._around, self._note_reduction))
            wrap(torch.autograd.graph.saved_tensors_hooks, "__enter__", self._around_hooks)

    def start(self) -> None:
        super().start()
        self._end = follow_functions(self._applied)

    def stop(self) -> None:
        super().stop()
        self._end()
        self._gathered.clear()
        self._reduced.clear()

    def _applied(self, run: Callable[..., Any], kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._in_functions += 1
        try:
            return run(*args, **kwargs)
        finally:
            self._in_functions -= 1

    def backward_begins(self, number: int, roots: Sequence[Tensor]) -> None:
        gathered, reduced, has_hooks = list(self._gathered), list(self._reduced), self._has_hooks
        self._gathered.clear()
        self._reduced.clear()
        self._has_hooks = False
        if gathered:
            attempt(self._look, gathered, roots, has_hooks)
        if not self._found.issuperset(kind for _, kind in reduced):
            ends = {id(one.grad_fn) for one in roots}
            nodes = {id(node) for node in _near([one.grad_fn for one in roots], set())[0]} - ends
            self._found.update(kind for node, kind in reduced if id(node) in nodes)

    def final_facts(self) -> Facts | None:
        exchanges = self._has_calls or bool(self._used)
        if not exchanges and not self._found:
            return None
        return {"used": sorted(self._used), "exchanges": exchanges, **dict.fromkeys(self._found, True)}

    def _around(self, note: Callable[..., None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and self.attends and not self._in_functions:
            attempt(partial(note, *args, **kwargs))
        return result

    def _note_reduction(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        is_of_all = torch.distributed.get_world_size(group) == torch.distributed.get_world_size()
        if torch.is_grad_enabled() and tensor.grad_fn is not None and is_of_all:
            is_one = tensor.numel() == 1  # often a loss that scripts print
            self._has_calls |= not is_one
            self._reduced.append((tensor.grad_fn, "reduced_number" if is_one else "reduced"))

    def _around_hooks(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a compiled region must not depend on what is noted
            self._has_hooks = True
        return original(*args, **kwargs)

    def _note_gathering(self, tensor_list: Sequence[Tensor], tensor: Tensor, *_: Any, **__: Any) -> None:
        if tensor.requires_grad and tensor.dim() > 1:  # one number, or one for each sample, is what scripts print
            self._has_calls = True
            self._note("all_gather", tensor, tensor_list)

    def _note_messages(self, p2p_op_list: Sequence[Any]) -> None:
        """Note what this rank exchanges; pipelines only send activations, or receive those that require a gradient."""
        received = [one.tensor for one in p2p_op_list if one.op is torch.distributed.irecv]
        constants = [one for one in received if one.dim() > 1 and not one.requires_grad]
        for sent in (one.tensor for one in p2p_op_list if one.op is torch.distributed.isend):
            if constants and sent.requires_grad:
                self._note("batch_isend_irecv", sent, constants)

    def _note(self, call: str, own: Tensor, parts: Sequence[Tensor]) -> None:
        if torch.is_grad_enabled():
            self._gathered.append(_Gathered(call, own.detach(), id(own.grad_fn), [*parts]))

    def _look(self, gathered: Sequence[_Gathered], roots: Sequence[Tensor], has_hooks: bool) -> None:
        nodes, is_whole = _near([one.grad_fn for one in roots], {one.node for one in gathered})
        if has_hooks and not is_whole:
            return  # reading a checkpoint's saved tensors would run it again
        with torch.no_grad(), paused():
            kept = [one for node in nodes for name in _SAVED if isinstance(one := getattr(node, name, None), Tensor)]
            for one in gathered:
                if any(_has_row(tensor, row) for row in one.rows_of_others() for tensor in kept):
                    self._used.add(one.call)


def _near(nodes: Iterable[Any], ends: set[int]) -> tuple[list[Any], bool]:
    """Return the nodes from a loss to ``ends`` or module calls, and whether these are all and have no parameter."""
    waiting, seen = list(nodes), dict[int, Any]()
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop(0)
        if node is not None and id(node) not in seen and id(node) not in ends and not isinstance(node, _CALL):
            seen[id(node)] = node
            waiting.extend(following for following, _ in node.next_functions)
    has_parameters = any(type(node).__name__ == "AccumulateGrad" for node in seen.values())
    return list(seen.values()), not waiting and not has_parameters


def _has_row(tensor: Tensor, row: Tensor) -> bool:
    """Return whether a tensor has a multiple of a row, or is the transpose of one that has."""
    if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.device != row.device:
        return False
    if not tensor.untyped_storage().nbytes():  # a weight that its wrapper has freed
        return False
    views = (one for one in (tensor, tensor.mT) if one.shape[-1] == row.numel())
    along = functional.normalize(row.double(), dim=0)
    return any(bool((functional.normalize(one.double(), dim=-1) @ along > ALONG).any()) for one in views)
