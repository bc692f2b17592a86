"""Notes whether packed documents are kept apart from each other, and padding from all of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from plumbline.check.evidence.training import Facts
from plumbline.check.rank.observers.document_layout import (
    DocumentLayout,
    first_documents,
    layout_of,
    pieces_of,
    positions_of,
)
from plumbline.check.rank.observers.objective import ObjectiveObserver
from plumbline.check.rank.observers.row_hashes import digest, row_hashes
from plumbline.recording.observer import Observer
from plumbline.recording.patching import attempt
from plumbline.recording.pause import is_rehearsal
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.replay import forward_watched

NAME = "documents"

MOST_PIECES = 16
"""The most runs of position ids, in all forwards together, of which it is noted whether the loss counts their ends."""


class DocumentObserver(Observer):
    """Changes a document, or padding, in a replay of the first call whose arguments declare some; notes what moves.

    Facts of the process, each with the name ``by`` of the declaring argument: ``documents`` and ``padding`` have
    ``moved``, where a change first reaches other positions, None if nowhere; ``why`` this is not known; ``limit``, the
    smallest change that counts; ``vectors``, whether tokens are vectors instead of numbers; ``gradients``, whether
    gradients of tokens were compared, too. ``seams`` counts the positions at the end of a document before another one,
    and the loss terms there whose target is the next document's first token. ``padded`` counts the padded positions,
    and the loss terms there. ``places``: whether position ids restart with each document. Without an argument's name:
    ``begins``, the smallest position at which a row of the first forward begins, and ``tokens``, a digest of its
    tokens. ``pieces``: for each run of position ids, the number of the backward pass, its first id, the id after its
    last one, how often the loss counts the prediction of the token after the run's last position, and that of the last
    token itself, and how often it leaves out a single token before the run's end, as at the end of a document.
    """

    name = NAME

    def __init__(self, objective: ObjectiveObserver) -> None:
        self._objective = objective
        self._layouts: list[DocumentLayout | None] = []
        self._positions: list[tuple[Tensor, Tensor] | None] = []
        self._pieces: dict[tuple[int, int, int], list[int]] = {}
        self._facts: Facts = {}

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_rehearsal():
            return
        layout = attempt(layout_of, module, args, kwargs)
        self._layouts.append(layout)
        self._positions.append(attempt(positions_of, module, args, kwargs))
        if "begins" not in self._facts and (part := self._positions[-1]) is not None:
            positions, tokens = part
            self._facts["begins"] = int(positions[:, 0].min())
            self._facts["tokens"] = digest(row_hashes([tokens]))
        if layout is None or layout.positions is None or "places" in self._facts:
            return
        if layout.documents_by:
            begins = layout.seams.roll(1, 1)
            self._facts["places"] = {"by": layout.documents_by, "restart": not bool(layout.positions[begins].any())}

    def backward_ends(self, number: int) -> Facts | None:
        layouts, self._layouts = self._layouts, []
        places, self._positions = self._positions, []
        calls = self._objective.calls
        if len(layouts) == len(calls):
            for layout, place, one in zip(layouts, places, calls, strict=True):
                counted = one.call.counted
                if counted is None or one.call.targets.is_floating_point():
                    continue
                if one.call.reduction == "none" and one.cotangent is not None:
                    counted = counted & (one.cotangent != 0).reshape(counted.shape)
                if layout is not None:
                    attempt(self._count, layout, one.call.targets, counted)
                if place is not None:
                    attempt(self._count_pieces, number, *place, one.call.targets, counted)
        return None

    def _count_pieces(self, number: int, positions: Tensor, tokens: Tensor, targets: Tensor, counted: Tensor) -> None:
        rows, length = positions.shape
        columns = targets.numel() // rows
        pieces = pieces_of(positions)
        if pieces is None or tokens.is_floating_point() or targets.numel() != rows * columns:
            return
        if columns not in (length, length - 1) or len(self._pieces) + len(pieces) > MOST_PIECES:
            return
        targets, counted = (
            nn.functional.pad(one.reshape(rows, columns), (0, length - columns)) for one in (targets, counted)
        )
        is_next = targets[:, :-1] == tokens.reshape(rows, length)[:, 1:]
        is_within = positions.diff(dim=1) == 1
        if not bool((is_next | ~is_within | ~counted[:, :-1]).all()):
            return  # the loss does not predict each next token
        # At the end of a run, the token in the next column is not the next one of the sequence.
        counted[:, :-1] &= is_within | ~is_next
        for first, last in ((first, last) for first, last in pieces if first < last):
            key = number, int(positions[0, first]), int(positions[0, last]) + 1
            known = self._pieces.setdefault(key, [0, 0, 0])
            own = counted[:, first : last + 1]
            known[0] += int(own[:, -1].sum())
            known[1] += int(own[:, -2].sum())
            known[2] += int((own[:, :-2] & ~own[:, 1:-1] & own[:, 2:]).sum()) if last - first > 2 else 0

    def _count(self, layout: DocumentLayout, targets: Tensor, counted: Tensor) -> None:
        rows, length = layout.shape
        columns = targets.numel() // rows
        if columns * rows != targets.numel():
            return
        if columns not in (length, length - 1) or layout.tokens.is_floating_point():
            return
        weighs = counted.reshape(rows, columns)
        following = nn.functional.pad(layout.tokens[:, 1:], (0, 1))[:, :columns]
        # The last position of padding before a row begins may predict its first token.
        padding = layout.padding & nn.functional.pad(layout.padding[:, 1:], (0, 1), value=True)
        at_seams, padding = layout.seams[:, :columns], padding[:, :columns]
        targets = targets.reshape(rows, columns)
        # Labels of another sequence, such as a decoder's, have no padding where this one has.
        is_own = (targets == following) | (targets == layout.tokens[:, :columns])
        self._add("padded", layout.padding_by, weighs & padding & is_own, padding)
        crossing = weighs & at_seams & (targets == following)
        self._add("seams", layout.documents_by, crossing, at_seams)

    def _add(self, name: str, by: str, terms: Tensor, of: Tensor) -> None:
        if by and bool(of.any()):
            known = self._facts.setdefault(name, {"by": by, "terms": 0, "of": 0})
            known["terms"] += int(terms.sum())
            known["of"] += int(of.sum())

    def before_replay(self, call: Any, exact: Any, native: Any) -> None:
        if {"documents", "padding"} <= self._facts.keys():
            return
        layout = attempt(layout_of, call.module, call.args, call.kwargs)
        if layout is None:
            return
        if layout.documents_by and "documents" not in self._facts:
            changed, others = first_documents(layout)
            if bool(others.any()):  # otherwise each row has a single document
                self._probe("documents", layout.documents_by, call, layout, changed, others, exact, native)
        if layout.padding_by and "padding" not in self._facts:
            with_padding = layout.padding.any(1, keepdim=True) & ~layout.padding
            self._probe("padding", layout.padding_by, call, layout, layout.padding, with_padding, exact, native)

    def _probe(
        self,
        name: str,
        by: str,
        call: Any,
        layout: DocumentLayout,
        changed: Tensor,
        others: Tensor,
        exact: Any,
        native: Any,
    ) -> None:
        from plumbline.check.rank.observers.document_probe import DocumentProbe  # few trainings need it

        vectors = layout.tokens.is_floating_point()
        facts: Facts = {"by": by, "moved": None, "why": "", "limit": 0.0, "vectors": vectors, "gradients": False}
        drawn = attempt(forward_watched, call, ReplayPrecision.NATIVE, native, _run_plainly)
        for precision, copies in ((exact.precision, exact), (ReplayPrecision.NATIVE, native)):
            try:
                probe = DocumentProbe(call, layout, precision, copies, drawn, by_row=name == "padding")
                moved = probe.moved(changed, others)
                facts.update(
                    moved=None if moved is None else asdict(moved),
                    why="",
                    limit=probe.limit,
                    gradients=probe.has_gradients,
                )
                break
            except Exception as error:
                facts["why"] = facts["why"] or f"{type(error).__name__}: {error}"
        self._facts[name] = facts

    def final_facts(self) -> Facts | None:
        pieces = [[*piece, *counts] for piece, counts in self._pieces.items()]
        return self._facts | ({"pieces": pieces} if pieces else {}) or None

    def stop(self) -> None:
        super().stop()
        self._layouts, self._positions = [], []


def _run_plainly(run: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(module, *args, **kwargs)
