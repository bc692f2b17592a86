"""Reads from a call's arguments which tokens belong to which document, and which tokens are padding."""

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
_PARTS_OF_ONE = ("segment", "sequence_id")
_SEGMENTS = 3
_MASKS = ("mask", "key_padding")
_OF_LOSSES = ("loss", "label", "target", "prompt", "completion", "response", "action", "answer")
"""Masks with these names say which tokens are learned, not which are padding."""


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """The document at each position (rows, positions) of a batch: whole numbers, ``PADDING`` for padding.

    ``tokens``: the token ids or vectors at these positions. ``documents_by`` and ``padding_by``: the names of the
    arguments that declare documents and padding, "" if none does. ``positions``: the given position ids, None without.
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
        """Whether each position (rows, positions) is the last one of a document that another one follows."""
        here, following = self.documents[:, :-1], self.documents[:, 1:]
        last = (here != following) & (here != PADDING) & (following != PADDING)
        return nn.functional.pad(last, (0, 1), value=False)

    @property
    def padding(self) -> Tensor:
        return self.documents == PADDING


def layout_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DocumentLayout | None:
    """Return the documents and padding that a call's arguments declare, None if they declare none."""
    given = list(_named(_bound(module, args, kwargs)))
    tokens = _tokens(given)
    if tokens is None:
        return None
    shape = tokens.shape[:2] if tokens.dim() > 1 else torch.Size((1, len(tokens)))
    positions = next((one for name, one in given if _is(name, _POSITIONS) and _fits(one, shape)), None)
    padding_by, real = _real(given, shape, tokens)
    documents_by, documents = _documents(given, shape, real, tokens)
    if documents is None and real is None:
        return None
    if documents is None:
        documents = torch.zeros(shape, dtype=torch.int64, device=tokens.device)
    if real is not None:
        documents = torch.where(real, documents, PADDING)
    at = None if positions is None else positions.reshape(shape)
    return DocumentLayout(documents, tokens.reshape(*shape, *tokens.shape[2:]), documents_by, padding_by, at)


def positions_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the position ids (rows, positions) that a call is given, and its tokens; None without position ids.

    Numbers that count up from column to column are position ids, whatever the name of the argument.
    """
    given = list(_named(_bound(module, args, kwargs)))
    tokens = _tokens(given)
    if tokens is None:
        return None
    shape = tokens.shape[:2] if tokens.dim() > 1 else torch.Size((1, len(tokens)))
    same = torch.Size((1, shape[1]))  # for all rows
    for name, one in given:
        if not _is_whole(one) or not (_fits(one, shape) or _fits(one, same)):
            continue
        if _is(name, _POSITIONS) or (one.shape[-1] > 1 and bool((one.diff(dim=-1) == 1).all())):
            return one.reshape(-1, shape[1]).expand(shape), tokens
    return None


def pieces_of(positions: Tensor) -> list[tuple[int, int]] | None:
    """Return the first and the last column of each run of position ids; None if rows have different ids."""
    if bool((positions != positions[:1]).any()):
        return None
    ends = [*((positions[0].diff() != 1).nonzero().flatten().tolist()), positions.shape[1] - 1]
    return list(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))


def document_ends(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int] | None:
    """Return 0 and where each document ends in a call's single row of tokens; None if its arguments do not tell."""
    layout = layout_of(module, args, kwargs)
    if layout is not None and layout.documents_by and layout.shape[0] == 1:
        lengths = torch.unique_consecutive(layout.documents[0], return_counts=True)[1]
        return [0, *(int(end) for end in lengths.cumsum(0))]
    positions, _ = positions_of(module, args, kwargs) or (torch.zeros(0, 0), None)
    if len(positions) == 1 and torch.equal(positions[0], torch.arange(positions.shape[1]).to(positions)):
        return [0, positions.shape[1]]
    return None


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{str(index): one for index, one in enumerate(args)}, **kwargs}


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
    """Return the token ids or vectors: the first argument with a fitting shape and no other meaning by its name."""
    for name, one in given:
        if _is(name, (*_BOUNDARIES, *_DOCUMENTS, *_POSITIONS, *_MASKS, "label", "target", "type")):
            continue
        if (
            type(one) is Tensor
            and _is_whole(one)
            and (one.dim() == 2 or (one.dim() == 1 and _is(name, ("id", "token"))))
        ):
            return one
        if type(one) is Tensor and one.dim() == 3 and one.is_floating_point():
            return one
    return None


def _real(given: list[tuple[str, Tensor]], shape: torch.Size, tokens: Tensor) -> tuple[str, Tensor | None]:
    """Return the name of the padding mask, and which positions are not padding.

    A mask may mark padding or all other tokens, or it may mark prompts or a prefix. It is a padding mask only if it
    leaves out repetitions of a single token.
    """
    for name, one in given:
        if not _is(name, _MASKS) or _is(name, _OF_LOSSES) or not _fits(one, shape) or one.is_floating_point():
            continue
        kept = one.reshape(shape) != 0
        for each in (kept, ~kept):
            is_some = bool(each.any(1).all()) and bool(((~each).sum(1) > 1).any())
            if is_some and _is_at_ends(each) and _is_one_token(tokens, ~each):
                return name, each
    return "", None


def _is_one_token(tokens: Tensor, where: Tensor) -> bool:
    found = tokens.reshape(where.numel(), -1)[where.reshape(-1)]
    return bool((found == found[:1]).all())


def _is_at_ends(kept: Tensor) -> bool:
    """Return whether everything left out is at the ends of its row: otherwise it is no padding."""
    return bool(((kept.long().diff(dim=1) == 1).sum(1) + kept[:, 0].long() == 1).all())


def _documents(
    given: list[tuple[str, Tensor]], shape: torch.Size, real: Tensor | None, tokens: Tensor
) -> tuple[str, Tensor | None]:
    for name, one in given:
        if _is_whole(one) and _is(name, _BOUNDARIES) and one.dim() == 1 and len(one) > 2:
            documents = _between(one, shape, tokens)
            if documents is not None:
                return name, documents
    for name, one in given:
        if not _is_whole(one) or not _fits(one, shape):
            continue
        if _is(name, _DOCUMENTS) or (_is(name, _MASKS) and int(one.max()) > 1):
            numbers = one.reshape(shape).long()
            is_pair = _is(name, _PARTS_OF_ONE) and int(numbers.max()) < _SEGMENTS  # the two parts of one input
            numbers = numbers.masked_fill((numbers == 0) & (numbers[:, :1] > 0), PADDING)
            one_by_one = (numbers.diff(dim=1) >= 0) | (numbers[:, 1:] == PADDING)
            if bool((numbers != numbers[:, :1]).any() & one_by_one.all()) and not is_pair and _has_runs(numbers):
                return name, numbers
    for name, one in given:
        if not one.is_floating_point() and _is(name, _POSITIONS) and _fits(one, shape):
            documents = _restarting(one.reshape(shape), real)
            if documents is not None and _has_runs(documents) and not _is_grid(documents):
                return name, documents
    return "", None


def _is_whole(one: Tensor) -> bool:
    return not one.is_floating_point() and not one.is_complex() and one.dtype != torch.bool


def _has_runs(documents: Tensor) -> bool:
    """Return whether most neighbours share a document: otherwise, numbers count tokens or name members of a set."""
    same = documents[:, 1:] == documents[:, :-1]
    return int(same.sum()) * 2 >= same.numel()


def _is_grid(documents: Tensor) -> bool:
    """Return whether all runs have the same length, as the column numbers in the lines of an image."""
    lengths = torch.unique_consecutive(
        documents + (documents.max() + 1) * torch.arange(len(documents), device=documents.device)[:, None],
        return_counts=True,
    )[1]
    return bool((lengths == lengths[0]).all())


def _between(boundaries: Tensor, shape: torch.Size, tokens: Tensor) -> Tensor | None:
    """Return the documents between boundaries, None if these fit another sequence. Padding may follow documents."""
    places, end = torch.arange(shape.numel(), device=boundaries.device), int(boundaries[-1])
    behind = (places >= end).reshape(shape)
    if int(boundaries[0]) or not 0 < end <= len(places) or not _is_one_token(tokens, behind.to(tokens.device)):
        return None
    documents = torch.searchsorted(boundaries.long(), places, right=True).reshape(shape)
    return documents.masked_fill(behind, PADDING).to(tokens.device)


def _restarting(positions: Tensor, real: Tensor | None) -> Tensor | None:
    """Return documents whose positions count up from 0, None if each row has only one, or in another order."""
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


def first_documents(layout: DocumentLayout) -> tuple[Tensor, Tensor]:
    """Return the positions of the first document in each row with several, and those of the row's other documents."""
    documents = layout.documents
    real = documents != PADDING
    first = documents.gather(1, real.long().argmax(1, keepdim=True))
    others = real & (documents != first)
    several = others.any(1, keepdim=True)
    return real & (documents == first) & several, others
