"""Reads from the graph of a loss, however it is written, which terms it adds up, and the weights of its means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.row_hashes import in_rows, tensors_in
from plumbline.check.rank.observers.unused_losses import is_auxiliary
from plumbline.recording.patching import attempt
from plumbline.recording.pause import is_paused
from plumbline.replay.alias import CallOutputs
from plumbline.replay.uses import inputs_of, nodes_before

MOST_NODES = 256

SAME_VALUES = (
    "AliasBackward0", "CloneBackward0", "ExpandBackward0", "ReshapeAliasBackward0", "SelectBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "ToCopyBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0",
    "ViewBackward0",
)  # fmt: skip
"""Nodes that hand on the single number of a loss."""

SAME_OUTPUTS = ("CallOutputsBackward", "_DDPSinkBackward")
"""Nodes that hand on each input as the output in the same place."""

_LINEAR = (
    "AbsBackward", "GatherBackward", "IndexBackward", "MeanBackward", "NegBackward", "SelectBackward", "SliceBackward",
    "SqueezeBackward", "ToCopyBackward", "UnsqueezeBackward", "ViewBackward",
)  # fmt: skip
"""Nodes whose output is multiplied by a positive number if their input is."""

REDUCES = ("MeanBackward", "SumBackward")

_MEAN = 1
"""How torch numbers the reduction ``mean`` of its loss functions."""


class UnknownWeightError(Exception):
    """The differentiated loss is no sum of means."""


def mean_weights(root: Any) -> list[list[float]] | None:
    """Return the weights of the means over a batch that add up to the differentiated loss; None if it is no such sum.

    A sum divided by a number counts as a mean over what the number may count: the sum's entries, its rows, or the
    entries that a mask keeps.

    Args:
        root: the node of the loss in the graph.
    """
    try:
        summands = _summands((root, 0), 1.0, [MOST_NODES])
        return [_counted(node, type(node).__name__, abs(factor)) for node, _, factor in summands]
    except (UnknownWeightError, AttributeError, RuntimeError):  # of a node that another version of torch has
        return None


def _summands(
    place: tuple[Any, int], factor: float, left: list[int], is_end: Callable[[Any, int], object] | None = None
) -> Iterator[tuple[Any, int, float]]:
    """Yield the nodes and outputs of the numbers that add up to a loss, each with the factor that multiplies it.

    A number for which ``is_end`` holds is not taken apart. ``left``: how many nodes may still be looked at.
    """
    left[0] -= 1
    node, output = place
    if node is None or left[0] < 0:
        raise UnknownWeightError
    name, following = type(node).__name__, node.next_functions
    if is_end is not None and is_end(node, output):
        yield node, output, factor
    elif name in SAME_OUTPUTS:
        yield from _summands(following[output], factor, left, is_end)
    elif is_same_value(node, name):
        yield from _summands(following[0], factor, left, is_end)
    elif name in ("AddBackward0", "SubBackward0"):
        second = float(node._saved_alpha) * (-1 if name == "SubBackward0" else 1)
        for inner, sign in zip(following, (1.0, second), strict=True):
            if inner[0] is not None:
                yield from _summands(inner, factor * sign, left, is_end)
    elif (times := scalar_of(node, name)) is not None:
        yield from _summands(_sole(node), factor * times, left, is_end)
    else:
        yield node, output, factor


def is_same_value(node: Any, name: str) -> bool:
    """Return whether a node hands on a single number, as a mean or a sum of one number without dimensions does."""
    return name in SAME_VALUES or (name.startswith(REDUCES) and not node._saved_self_sym_sizes)


def _constant_of(node: Any, name: str) -> float | None:
    if name == "NegBackward0":
        return -1.0
    if name not in ("DivBackward0", "MulBackward0"):
        return None
    (left, _), (right, _) = node.next_functions
    if (right is not None) == (left is not None) or (name == "DivBackward0" and left is None):
        raise UnknownWeightError
    other = node._saved_other if right is None else node._saved_self
    if not isinstance(other, Tensor) or other.numel() != 1:
        raise UnknownWeightError
    return 1.0 / float(other) if name == "DivBackward0" else float(other)


def scalar_of(node: Any, name: str) -> float | None:
    """Return the number by which a node multiplies, None where it does something else."""
    try:
        return _constant_of(node, name)
    except (UnknownWeightError, AttributeError):
        return None


def _counted(node: Any, name: str, factor: float) -> list[float]:
    """Return the weights that a mean or a sum may have; ``factor`` is what it is multiplied by."""
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return [factor]
    if name.startswith("MeanBackward"):
        return [factor * inner_constant(_input_of(node))]
    if name != "SumBackward0":
        raise UnknownWeightError
    factor *= inner_constant(_input_of(node))
    sizes = node._saved_self_sym_sizes
    counts = {float(torch.Size(sizes).numel()), float(sizes[0]), *_kept(node.next_functions[0][0])}
    if counts == {1.0}:
        raise UnknownWeightError  # a sum of one entry looks like a mean
    return sorted(factor * count for count in counts)


def inner_constant(node: Any) -> float:
    """Return the number by which a node multiplies every entry, together with the nodes before it, as far as known."""
    constant = power = 1.0
    for _ in range(MOST_NODES):
        name = type(node).__name__
        if name in ("StackBackward0", "CatBackward0"):
            raise UnknownWeightError
        if name == "PowBackward0":
            power *= float(node._saved_exponent)
        elif name in ("DivBackward0", "MulBackward0"):
            (left, _), (right, _) = node.next_functions
            if name == "MulBackward0" and left is right:
                power *= 2
            elif left is not None and right is not None:
                return constant
            elif mask_of(node) is None and not (power != 1 and _differs_by_entry(node)):
                constant *= abs(_constant_of(node, name) or 0.0) ** power
        elif not name.startswith(_LINEAR):
            return constant
        node = _input_of(node)
    return constant


def _input_of(node: Any) -> Any:
    return next((one for one, _ in node.next_functions if one is not None), None)


def _differs_by_entry(node: Any) -> bool:
    """Whether a node multiplies each entry by a number of its own, such as the scale of its feature."""
    return any(isinstance(one, Tensor) and one.numel() > 1 for one in (node._saved_self, node._saved_other))


def _kept(node: Any) -> Iterator[float]:
    if (mask := mask_of(node)) is not None:
        yield float(mask.sum())


def mask_of(node: Any) -> Tensor | None:
    """Return the mask of zeros and ones by which a node multiplies, None where it does something else."""
    if type(node).__name__ != "MulBackward0":
        return None
    for one in (node._saved_self, node._saved_other):
        if isinstance(one, Tensor) and not one.requires_grad and one.numel() > 1:
            return one if bool(((one == 0) | (one == 1)).all()) else None
    return None


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
        self._handles: list[Any] = []
        self.terms = list(self._terms(root))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _terms(self, root: Any) -> Iterator[LossTerm]:
        for node, output, factor in _summands((root, 0), 1.0, [MOST_NODES], self._name_of):
            name = type(node).__name__
            if known := self._name_of(node, output):
                yield LossTerm(known, factor, is_call=id(node) in self._calls)
            elif name.startswith(REDUCES):
                yield self._reduced(node, name, factor)
            elif name == "AccumulateGrad":
                yield LossTerm("a parameter", factor)
            else:
                yield LossTerm("a norm" if "Norm" in name else f"a number ({name.partition('Backward')[0]})", factor)

    def _name_of(self, node: Any, output: int) -> str | None:
        return self._calls.get(id(node)) or self._names.get(id(node)) or _returned_as(node, output)

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
    sizes = {_leading(one)[-1] for one in (node, *inputs_of(node)) if one is not None}
    sizes -= {1}
    for one in islice(nodes_before(inputs_of(node), nearest_first=True), MOST_NODES):
        masks = type(one).__name__ in ("MaskedFillBackward0", "WhereBackward0") or mask_of(one) is not None
        if masks and sizes & set(_leading(one)):
            return True
    return False


def _leading(node: Any) -> list[int]:
    """Return how many entries the first one, two, … dimensions of a node's result have."""
    known = getattr(node, "_input_metadata", ())
    return list(accumulate(known[0].shape, mul)) if known and len(known[0].shape) else [1]


def _is_divided(node: Any, name: str) -> bool:
    """Return whether a node multiplies by one number, or divides by counts."""
    if name not in ("DivBackward0", "MulBackward0"):
        return False
    if scalar_of(node, name) is not None:
        return True
    other = node._saved_other if name == "DivBackward0" else None
    if not isinstance(other, Tensor) or other.requires_grad:
        return False
    return bool(((other > 0) & ((other - other.round()).abs() < 1e-4)).all())
