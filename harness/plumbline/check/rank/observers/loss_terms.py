"""Reads from the graph of a loss which terms it adds up, including those that no loss function of torch computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.loss_weight import (
    MOST_NODES,
    REDUCES,
    SAME_OUTPUTS,
    UnknownWeightError,
    constant_of,
    inner_constant,
    is_same_value,
    mask_of,
)
from plumbline.check.rank.observers.row_hashes import in_rows, tensors_in
from plumbline.check.rank.observers.unused_losses import is_auxiliary
from plumbline.recording.patching import attempt
from plumbline.recording.pause import is_paused
from plumbline.replay.alias import CallOutputs

MOST_ROWS = 512
"""The most rows of a batch whose weights are kept. For larger batches, only the sums are kept."""

NOT_ROWS = 0
"""Stands for the number of samples if several are packed in a row, or if the first dimension may be time."""

_SAME_ENTRIES = (
    "AliasBackward0", "CloneBackward0", "NegBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
)  # fmt: skip
"""Nodes that hand on every entry of a tensor."""

_KEEPS_SOME = ("MaskedFillBackward0", "MaskedSelectBackward0", "WhereBackward0")
"""Nodes that hand on some entries of a tensor, and leave out the others."""

_EACH_COUNTS = (
    "AbsBackward", "ExpBackward", "GatherBackward", "IndexBackward", "LogBackward", "Log1PBackward",
    "LogSigmoidBackward", "LogSoftmaxBackward", "PowBackward", "SoftplusBackward",
)  # fmt: skip
"""Nodes whose entries are all known to be terms although no mask says so."""

_CALL: Any = CallOutputs._backward_cls


@dataclass(eq=False)
class LossTerm:
    """One number that is added to the loss, multiplied by ``factor``.

    ``is_call``: a followed loss function of torch computes it. ``levels``: for a mean or a sum that is written by hand,
    what ``weights_of`` returns for the reduced tensor, or for each of several tensors if it is not known which one has
    an entry for each token. ``sure`` in each says whether all entries with a weight are terms: a function that the
    script defines may ignore some. ``scaled``: each entry contains a factor, such as that in (x / 2)², which its weight
    leaves out.
    """

    name: str
    factor: float
    is_call: bool = False
    levels: list[Facts] = field(default_factory=list)

    @property
    def facts(self) -> Facts:
        """The facts that are noted."""
        return {"name": self.name, "factor": self.factor, "call": self.is_call, "levels": self.levels}


class LossTerms:
    """The terms of the loss that one backward pass differentiates. Their weights are known when it has ended.

    Args:
        root: the node of the loss in the graph.
        calls: the names of the loss functions that were called, by the ids of their nodes.
        names: the names of other numbers, by the ids of their nodes.
        rows: what ``samples_in`` returns for the forward.
    """

    def __init__(self, root: Any, calls: Mapping[int, str], names: Mapping[int, str], rows: int | None) -> None:
        self._calls, self._names, self._rows = calls, names, rows
        self._left = MOST_NODES
        self._handles: list[Any] = []
        self.terms = list(self._terms(root, 0, 1.0))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _terms(self, node: Any, output: int, factor: float) -> Iterator[LossTerm]:
        self._left -= 1
        if node is None or self._left < 0:
            raise UnknownWeightError
        name = type(node).__name__
        following = node.next_functions
        if id(node) in self._calls:
            yield LossTerm(self._calls[id(node)], factor, is_call=True)
        elif (known := self._names.get(id(node)) or _returned_as(node, output)) is not None:
            yield LossTerm(known, factor)
        elif name in SAME_OUTPUTS:
            yield from self._terms(following[output][0], following[output][1], factor)
        elif is_same_value(node, name):
            yield from self._terms(following[0][0], following[0][1], factor)
        elif name in ("AddBackward0", "SubBackward0"):
            second = float(node._saved_alpha) * (-1 if name == "SubBackward0" else 1)
            for (inner, place), sign in zip(following, (1.0, second), strict=True):
                if inner is not None:
                    yield from self._terms(inner, place, factor * sign)
        elif name in ("NegBackward0", "DivBackward0", "MulBackward0") and (times := _scalar(node, name)) is not None:
            inner, place = _sole(node)
            yield from self._terms(inner, place, factor * times)
        elif name.startswith(REDUCES):
            yield self._reduced(node, name, factor)
        elif name == "AccumulateGrad":
            yield LossTerm("a parameter", factor)
        else:
            yield LossTerm("a norm" if "Norm" in name else f"a number ({name.partition('Backward')[0]})", factor)

    def _reduced(self, node: Any, name: str, factor: float) -> LossTerm:
        """Return a mean or a sum that is written by hand, and hook into the tensors that it may reduce."""
        kind = "mean" if name.startswith("Mean") else "sum"
        term = LossTerm(f"a {kind} that the script computes", factor)
        levels: list[tuple[Any, int]] = []
        masked = -1  # the last of the levels that a mask was applied to
        node, output = _sole(node)
        while True:
            name = type(node).__name__
            if id(node) in self._calls:
                return LossTerm(self._calls[id(node)], factor, is_call=True)
            if name in SAME_OUTPUTS:
                node, output = node.next_functions[output]
                continue
            if name.startswith(REDUCES):
                levels.append((node, output))
            elif _is_masking(node, name):
                masked = len(levels)
            elif name not in _SAME_ENTRIES and not _is_divided(node, name):
                break
            node, output = _sole(node)
        levels.append((node, output))
        # Factors of the terms, such as advantages, may leave some out unless a mask did so before.
        if masked >= 0 or not name.startswith(("MulBackward", "DivBackward")):
            sure = name[-1].isdigit() and (masked >= 0 or name.startswith(_EACH_COUNTS))
            sure = sure and attempt(hides_a_mask, node) is False
            for one, place in levels[max(masked, 0) :]:
                summary: Facts = {"sure": sure, "scaled": attempt(inner_constant, node) not in (1.0, None)}
                term.levels.append(summary)
                self._handles.append(one.register_prehook(partial(_arrived, summary, place, self._rows)))
        return term


def weights_of(counts: Tensor, weights: Tensor, rows: int | None, *, even: Tensor | None = None) -> Facts:
    """Return the number of terms, the sum of their weights, and whether all weights are equal; also for each row."""
    facts: Facts = {
        "terms": float(counts.sum()),
        "weight": float(weights.sum()),
        "even": _all_even(counts, weights) if even is None else bool(even.all()),
        "rows": None,
    }
    if rows is not None and rows <= MOST_ROWS and len(counts) == rows:
        own = [counts.reshape(rows, -1).sum(1), weights.reshape(rows, -1).sum(1)]
        each = even if even is not None else [_all_even(*pair) for pair in zip(counts, weights, strict=True)]
        facts["rows"] = [list(one) for one in zip(*(part.tolist() for part in own), map(bool, each), strict=True)]
    return facts


def _arrived(summary: Facts, output: int, rows: int | None, cotangents: tuple[Tensor | None, ...]) -> None:
    attempt(_note, summary, cotangents[output], rows)


def _note(summary: Facts, cotangent: Tensor | None, rows: int | None) -> None:
    if cotangent is None or is_paused():
        return
    weights = cotangent.detach().double()
    if float(weights.sum()) < 0:  # of an objective that is maximised, such as the likelihood
        weights = -weights
    if (own := rows_among(weights, rows)) is not None:
        weights = weights.reshape(own, -1)
    summary.update(weights_of((weights != 0).double(), weights, own), dtype=str(cotangent.dtype).partition(".")[2])


def samples_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return how many samples a forward is given, ``NOT_ROWS`` where samples are not rows, None if that is unknown."""
    places = kwargs.get("position_ids")
    packs = isinstance(places, Tensor) and bool((places.diff(dim=-1) < 0).any())
    if packs or any(name.startswith(("cu_seq", "seq_idx")) for name in kwargs):
        return NOT_ROWS
    if any(getattr(one, "batch_first", None) is False for one in module.modules()):
        return NOT_ROWS
    tensors = in_rows(tensors_in((args, kwargs)))
    return len(tensors[0]) if tensors else None


def rows_among(terms: Tensor, samples: int | None) -> int | None:
    """Return the number of samples that a loss's terms belong to. One dimension may hold the terms of all samples."""
    if not terms.dim() or not terms.numel() or samples == NOT_ROWS:
        return None
    if samples and len(terms) % samples == 0:
        return samples
    return len(terms) if terms.dim() > 1 else None


def _all_even(counts: Tensor, weights: Tensor) -> bool:
    known = weights[counts > 0]
    return not known.numel() or bool((known - known[0]).abs().max() <= 1e-3 * known[0].abs())


def _returned_as(node: Any, output: int) -> str | None:
    if not isinstance(node, _CALL):
        return None
    name = node.call.scalars.get(output)
    return f"{name} in the output of {node.call.name}" if isinstance(name, str) and is_auxiliary(name) else None


def _scalar(node: Any, name: str) -> float | None:
    try:
        return constant_of(node, name)
    except (UnknownWeightError, AttributeError):
        return None


def _sole(node: Any) -> tuple[Any, int]:
    found = [(inner, place) for inner, place in node.next_functions if inner is not None]
    if len(found) != 1:
        raise UnknownWeightError
    return found[0]


def _is_masking(node: Any, name: str) -> bool:
    if name == "IndexBackward0":
        indices = node._saved_indices
        return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
    return name in _KEEPS_SOME or mask_of(node) is not None


def hides_a_mask(node: Any) -> bool:
    """Return whether the forward before a node applies a mask with as many entries as the node or its inputs."""
    sizes = {_leading(one)[-1] for one in (node, *(inner for inner, _ in node.next_functions)) if one is not None}
    sizes -= {1}
    waiting, seen = [one for one, _ in node.next_functions], set[int]()
    while waiting and len(seen) < MOST_NODES:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        masks = type(one).__name__ in ("MaskedFillBackward0", "WhereBackward0") or mask_of(one) is not None
        if masks and sizes & set(_leading(one)):
            return True
        waiting.extend(inner for inner, _ in one.next_functions)
    return False


def _leading(node: Any) -> list[int]:
    """Return how many entries the first one, two, … dimensions of a node's result have."""
    known = getattr(node, "_input_metadata", ())
    return list(accumulate(known[0].shape, mul)) if known and len(known[0].shape) else [1]


def _is_divided(node: Any, name: str) -> bool:
    """Return whether a node multiplies by one number, or divides by counts."""
    if name not in ("DivBackward0", "MulBackward0"):
        return False
    if _scalar(node, name) is not None:
        return True
    other = node._saved_other if name == "DivBackward0" else None
    if not isinstance(other, Tensor) or other.requires_grad:
        return False
    return bool(((other > 0) & ((other - other.round()).abs() < 1e-4)).all())
