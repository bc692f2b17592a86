"""Which tokens of a batch belong to which document, and which are padding, as far as its arguments say so."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PADDING = -1
"""The document of positions that are padding."""

_BOUNDARIES = ("cu_seqlens", "cu_seq_lens", "cu_doc", "cu_q")
_DOCUMENTS = ("document_id", "documents", "doc_id", "docs", "seq_idx", "seq_id", "sequence_id", "sample_id", "segment")
_POSITIONS = ("position_id", "positions", "pos_id", "input_pos")
_SEGMENTS = 3
_MASKS = ("attention_mask", "attn_mask", "padding_mask", "pad_mask", "key_padding", "mask")


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """The documents (rows, positions) of a batch: whole numbers, ``PADDING`` where a position is padding.

    ``tokens`` are the numbers or the vectors at these positions. ``documents_by`` and ``padding_by`` name the argument
    that says which documents and which padding there are, "" where none does. ``positions`` are the position ids that
    are given, None without.
    """

    documents: Tensor
    tokens: Tensor
    documents_by: str
    padding_by: str
    positions: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.documents.shape[0], self.documents.shape[1]

    @property
    def seams(self) -> Tensor:
        """Whether a position (rows, positions) is the last one of a document before another one."""
        here, following = self.documents[:, :-1], self.documents[:, 1:]
        last = (here != following) & (here != PADDING) & (following != PADDING)
        return nn.functional.pad(last, (0, 1), value=False)

    @property
    def padding(self) -> Tensor:
        return self.documents == PADDING


def layout_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DocumentLayout | None:
    """Return what the arguments of a call say of documents and padding, None where they say nothing."""
    given = list(_named(_bound(module, args, kwargs)))
    tokens = _tokens(given)
    if tokens is None:
        return None
    shape = tokens.shape[:2] if tokens.dim() > 1 else torch.Size((1, len(tokens)))
    positions = next((one for name, one in given if _is(name, _POSITIONS) and _fits(one, shape)), None)
    padding_by, real = _real(given, shape)
    documents_by, documents = _documents(given, shape, real)
    if documents is None and real is None:
        return None
    if documents is None:
        documents = torch.zeros(shape, dtype=torch.int64, device=tokens.device)
    if real is not None:
        documents = torch.where(real, documents, PADDING)
    at = None if positions is None else positions.reshape(shape)
    return DocumentLayout(documents, tokens.reshape(*shape, *tokens.shape[2:]), documents_by, padding_by, at)


def positions_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the position ids (rows, positions) that a call is given, None without."""
    given = _named(_bound(module, args, kwargs))
    found = (one for name, one in given if _is(name, _POSITIONS) and not one.is_floating_point() and 0 < one.dim() < 3)
    return next((one.reshape(-1, one.shape[-1]) for one in found), None)


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{str(place): one for place, one in enumerate(args)}, **kwargs}


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _named(part, str(key))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _named(part, name)


def _tokens(given: list[tuple[str, Tensor]]) -> Tensor | None:
    """Return the numbers or vectors of the tokens: the first argument that may be one and is named as nothing else."""
    for name, one in given:
        if _is(name, (*_BOUNDARIES, *_DOCUMENTS, *_POSITIONS, *_MASKS, "label", "target", "type")):
            continue
        whole = not one.is_floating_point() and one.dtype != torch.bool
        if type(one) is Tensor and whole and (one.dim() == 2 or (one.dim() == 1 and _is(name, ("id", "token")))):
            return one
        if type(one) is Tensor and one.dim() == 3 and one.is_floating_point():
            return one
    return None


def _real(given: list[tuple[str, Tensor]], shape: torch.Size) -> tuple[str, Tensor | None]:
    """Return which positions are not padding, and the name of the mask that says so."""
    for name, one in given:
        if not _is(name, _MASKS) or not _fits(one, shape) or one.is_floating_point():
            continue
        kept = one.reshape(shape) != 0
        kept = ~kept if "pad" in name.lower() and one.dtype == torch.bool else kept
        if bool(kept.all()) or not bool(kept.any(1).all()) or not _is_at_ends(kept):
            continue
        return name, kept
    return "", None


def _is_at_ends(kept: Tensor) -> bool:
    """Say whether what is left out stands before or behind the rest of its row: otherwise it is no padding."""
    return bool(((kept.long().diff(dim=1) == 1).sum(1) + kept[:, 0].long() == 1).all())


def _documents(given: list[tuple[str, Tensor]], shape: torch.Size, real: Tensor | None) -> tuple[str, Tensor | None]:
    for name, one in given:
        whole = not one.is_floating_point() and one.dtype != torch.bool
        if whole and _is(name, _BOUNDARIES) and one.dim() == 1 and len(one) > 2:
            return name, _between(one, shape)
    for name, one in given:
        whole = not one.is_floating_point() and one.dtype != torch.bool and _fits(one, shape)
        if whole and (_is(name, _DOCUMENTS) or (_is(name, _MASKS) and int(one.max()) > 1)):
            numbers = one.reshape(shape).long()
            is_pair = "segment" in name and int(numbers.max()) < _SEGMENTS  # the two parts of one input
            numbers = numbers.masked_fill((numbers == 0) & (numbers[:, :1] > 0), PADDING)
            one_by_one = (numbers.diff(dim=1) >= 0) | (numbers[:, 1:] == PADDING)
            if bool((numbers != numbers[:, :1]).any() & one_by_one.all()) and not is_pair:
                return name, numbers
    for name, one in given:
        if not one.is_floating_point() and _is(name, _POSITIONS) and _fits(one, shape):
            documents = _restarting(one.reshape(shape), real)
            if documents is not None:
                return name, documents
    return "", None


def _between(boundaries: Tensor, shape: torch.Size) -> Tensor | None:
    places = torch.arange(shape.numel(), device=boundaries.device)
    if int(boundaries[0]) or int(boundaries[-1]) > len(places):
        return None
    return torch.searchsorted(boundaries.long(), places, right=True).reshape(shape)


def _restarting(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """Return documents whose positions go up by one from 0, None where there is one in each row, or another order."""
    begins = positions[:, 1:] == 0
    runs = positions[:, 1:] - positions[:, :-1] == 1
    known = begins | runs
    if real is not None:
        known = known | ~real[:, 1:] | ~real[:, :-1]
        begins = begins & real[:, 1:] & real[:, :-1]
    if not bool(known.all()) or not bool(begins.any()):
        return None
    return nn.functional.pad(begins.long().cumsum(1), (1, 0))


def _fits(one: Tensor, shape: torch.Size) -> bool:
    return tuple(one.shape) == tuple(shape) or (shape[0] == 1 and tuple(one.shape) == tuple(shape[1:]))


def _is(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)
