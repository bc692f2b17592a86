"""Finds which pieces of a model's parameters the optimizers of all ranks hold as copies (master weights)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import BackwardPass, Facts, Parameter, as_real, segment
from plumbline.check.rank.known_optimizers import KnownOptimizers
from plumbline.check.rank.local_gradients import ArrivedGradients
from plumbline.check.rank.optimizer_gradients import exact_segment, joined
from plumbline.check.rank.store_exchange import AbsentRankError, Exchange
from plumbline.check.rank.tensor_digest import tensor_digest
from plumbline.evidence.projection import fingerprint
from plumbline.evidence.rank_file import dtype_name
from plumbline.recording.grad_scaler import scale_left
from plumbline.recording.master_weights import Piece, pieces_of, shape_of
from plumbline.recording.parameters import ParameterNames, parameters_of

TRIES = 2
"""The number of steps before which pieces are searched for. The model has the optimizer's weights after a step, if not
before it."""

Span = tuple[int, int]
"""The first entry of a piece and the number of its entries."""


@dataclass(frozen=True, eq=False)
class HeldPiece:
    """A piece of a model's parameter that some rank's optimizer holds. ``own`` is set if this rank's optimizer does.

    ``is_guessed``: it can be a piece of another parameter with the same values.
    """

    name: str
    parameter: Tensor
    start: int
    length: int
    own: Piece | None
    is_guessed: bool

    @property
    def _is_whole(self) -> bool:
        return self.length == shape_of(self.parameter).numel()

    @property
    def recorded_name(self) -> str:
        """The parameter's name, with the range of entries of a piece that is not the whole parameter."""
        return self.name if self._is_whole else f"{self.name}[{self.start}:{self.start + self.length}]"

    def recorded(self, masters: Sequence[Tensor], communicated: torch.dtype | None) -> Parameter:
        """Return the piece as a parameter of the optimizer. Ranks sum gradients in the dtype ``communicated``."""
        shape = tuple(shape_of(self.parameter))
        master = self.parameter if self.own is None else self.own.master
        dtypes = (self.parameter.dtype, communicated, getattr(self.parameter, "comm_dtype", None))
        held = -1 if self.own is None else next(n for n, one in enumerate(masters) if one is self.own.master)
        return Parameter(
            self.recorded_name,
            shape if self._is_whole else (self.length,),
            dtype_name(master.dtype),
            dtype_name(max((one for one in dtypes if isinstance(one, torch.dtype)), key=_eps)),
            held_in=held,
            guessed=self.is_guessed,
        )

    def received(self, scale: float) -> tuple[Tensor, float]:
        """Return the segment and the norm of the gradient with which this rank's optimizer steps."""
        if self.own is None or self.own.master.grad is None:
            return torch.full((self._kept,), torch.nan, dtype=torch.float64), 0.0
        gradient = self.own.of(self.own.master.grad.detach())
        return segment(gradient) / scale, float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / scale

    @property
    def _kept(self) -> int:
        return min(self.length, len(segment(torch.zeros(self.length))))


class MasterLayout:
    """The pieces that one optimizer, or a part of it, updates on all ranks. ``owner`` is the optimizer's first number.

    ``apart`` names the parameters whose values differed between ranks when the pieces were found. ``is_divided``: the
    pieces are no copies, but the model's own parameters, each of which one rank steps.
    """

    def __init__(
        self, owner: int, held: Sequence[HeldPiece], apart: Collection[str], *, is_divided: bool = False
    ) -> None:
        self.owner = owner
        self.held = held
        self._apart = apart
        self._is_divided = is_divided

    def on(self, optimizer: Optimizer) -> MasterLayout:
        """Return the layout with the pieces located in the optimizer's current parameters."""
        masters = parameters_of(optimizer)
        held = [replace(one, own=one.own and one.own.within(masters)) for one in self.held]
        return MasterLayout(self.owner, held, self._apart, is_divided=self._is_divided)

    def known(self) -> Iterator[tuple[int, Piece]]:
        """Yield this rank's pieces whose parameter is certain, with their numbers."""
        for number, one in enumerate(self.held):
            if one.own is not None and not one.is_guessed:
                yield number, one.own

    def recorded(self, optimizer: Optimizer) -> tuple[Parameter, ...]:
        communicated = _of_trainer().get("communication_data_type")
        return tuple(one.recorded(parameters_of(optimizer), communicated) for one in self.held)

    def received(self, optimizer: Optimizer) -> list[tuple[Tensor, float]]:
        return [one.received(scale_left(optimizer)) for one in self.held]

    def unclipped(self, whole: dict[int, Tensor], received: Sequence[Tensor]) -> Tensor | None:
        """Return the vector from before a function clipped gradients of the optimizer's copies; None if none did."""
        parts = []
        for one, given in zip(self.held, received, strict=True):
            part = given
            if one.own is not None and id(one.own.master) in whole:
                part = segment(one.own.of(whole[id(one.own.master)]))
            parts.append(part)
        return torch.cat(parts) if any(id(one.own.master) in whole for one in self.held if one.own) else None

    def vector(self, one: ArrivedGradients) -> BackwardPass:
        parameters = list({id(piece.parameter): piece for piece in self.held}.values())
        lengths = {id(p.parameter): sum(o._kept for o in self.held if o.parameter is p.parameter) for p in parameters}
        return joined(one, lengths)

    def facts(self, received: Sequence[tuple[Tensor, float]], stale_before: dict[str, float]) -> Facts:
        """Return the norms of the pieces' gradients, the clipping limit, and facts about the model's weights.

        ``apart`` names the pieces whose values differ between ranks. ``prints`` are fingerprints of the model's
        weights. ``stale`` and ``stale_before`` say how far these are from the optimizer's weights, now and before the
        pieces were found. ``divided`` has digests of the model's parameters on this rank if ranks divide them.
        """
        return {
            "owner": self.owner,
            "norms": [norm for _, norm in received],
            "limit": _of_trainer().get("clip_grad"),
            "stale_before": stale_before,
            "apart": [one.recorded_name for one in self.held if one.name in self._apart],
            "prints": [0 if one.own is None else fingerprint(one.own.model_weights.contiguous()) for one in self.held],
            "stale": {str(n): piece.distance for n, piece in self.known() if piece.is_stale},
            "divided": [tensor_digest(one.parameter) for one in self.held] if self._is_divided else [],
        }


class _Weights:
    """Copies of the weights of a model and an optimizer, kept until it is known which belong together."""

    def __init__(self, model: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        self._copies = {id(one): one.detach().clone() for one in (*model, *masters)}

    def distance(self, piece: Piece) -> float:
        """Return how far the model's weights were from the optimizer's."""
        if id(piece.parameter) not in self._copies or id(piece.master) not in self._copies:
            return 0.0
        return replace(
            piece, parameter=self._copies[id(piece.parameter)], master=self._copies[id(piece.master)]
        ).distance


class MasterLayouts:
    """Finds the layouts when optimizers step, and reduces gradients of the model's parameters to those of pieces."""

    def __init__(self, names: ParameterNames, optimizers: KnownOptimizers) -> None:
        self._names = names
        self._optimizers = optimizers
        self._exchange = Exchange("plumbline master weights")
        self._layouts: dict[tuple[int, int], MasterLayout] = {}
        self._tries: dict[int, int] = {}
        self._unknown: dict[int, _Weights] = {}
        self._spans: dict[int, list[Span]] = {}
        self._shares = Exchange("plumbline divided parameters")
        self._reached: set[int] = set()
        self._has_offered, self._is_decided, self._steps = False, False, 0

    def of(self, number: int) -> MasterLayout | None:
        """Return the layout of an optimizer; None if it holds the model's own parameters, or unknown ones."""
        return self._layouts.get(self._optimizers.place(number))

    @property
    def stepped(self) -> Iterator[Tensor]:
        """The model's parameters that some optimizer holds in pieces, or can hold if some pieces are guessed."""
        held = [one for layout in self._layouts.values() for one in layout.held]
        yield from (one.parameter for one in held)
        if any(one.is_guessed for one in held):
            yield from self.candidates()

    def held(self) -> Iterator[tuple[Tensor, list[tuple[Optimizer, HeldPiece]]]]:
        """Yield the model's parameters that optimizers of any rank hold in certain pieces, with these pieces."""
        optimizers = list(self._optimizers)
        found: dict[int, tuple[Tensor, list[tuple[Optimizer, HeldPiece]]]] = {}
        for layout in self._layouts.values():
            optimizer = optimizers[layout.owner]
            for one in layout.on(optimizer).held:
                found.setdefault(id(one.parameter), (one.parameter, []))[1].append((optimizer, one))
        yield from (one for one in found.values() if not any(piece.is_guessed for _, piece in one[1]))

    def candidates(self) -> list[Tensor]:
        """Return the model's parameters that are in no optimizer, if some optimizer has none of the model's.

        Those that only other ranks' optimizers step count as well, as soon as all ranks have said which they step.
        """
        if self._has_offered and not self._is_decided:
            self._divide()
        has_others = any(self._is_other(optimizer) for optimizer in self._optimizers)
        if not has_others and not self._spans:
            return []
        known = set(map(id, self._optimizers.parameters()))
        others = [one for _, one in self._names.trainable() if id(one) not in known]
        return others if has_others else [one for one in others if id(one) in self._spans]

    def reduced(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Return the segments of a gradient's pieces, concatenated; None if the parameter has no pieces."""
        spans = self._spans.get(id(parameter))
        if spans is None:
            return None
        flat = as_real(gradient).reshape(-1)
        return torch.cat([segment(flat[start : start + length]) for start, length in spans])

    def exact(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """Return the segments to keep of an exact gradient."""
        found = self.reduced(parameter, gradient)
        return exact_segment(gradient, parameter.dtype) if found is None else found

    def find(self, optimizer: Optimizer, number: int, passes: Sequence[ArrivedGradients]) -> None:
        """Find, together with all ranks, what an optimizer holds before its step, if no pass reached its parameters."""
        if not self._has_offered and self._steps < TRIES and self._has_a_share(optimizer):
            self._offer(optimizer)
        self._steps += 1
        tries = self._tries.get(number, 0)
        if tries == TRIES or self.of(number) is not None or not self._may_hold_copies(optimizer, passes):
            return
        self._tries[number] = tries + 1
        owner, part = self._optimizers.place(number)
        model = dict(self._names.trainable())
        candidates, masters = self.candidates(), parameters_of(optimizer)
        pieces = pieces_of_megatron(candidates, masters) or pieces_of(candidates, masters)
        guessed: set[int] = set()
        if not pieces and tries + 1 == TRIES:
            pieces = pieces_of(candidates, masters, guess=True)
            guessed = _guessed(candidates, pieces)
        if not all(self._from_all(bool(pieces))) and tries + 1 < TRIES:
            self._unknown[number] = _Weights(candidates, masters)
            return
        mapped = {one.part for one in pieces}
        names = {id(one): name for name, one in model.items()}
        sizes = {name: shape_of(one).numel() for name, one in model.items()}
        own = {}
        for piece in pieces:
            name = names[id(piece.parameter)]
            own[piece.part if len(mapped) > 1 else part, name, sizes[name], piece.start, piece.length] = piece
        every = self._from_all(
            {
                "pieces": list(own),
                "guessed": [name for (_, name, *_), one in own.items() if id(one) in guessed],
                # ZeRO 3 shards the model itself, so each rank has different entries.
                "prints": {names[id(one)]: fingerprint(one.detach().contiguous()) for one in candidates
                           if not hasattr(one, "ds_tensor")},
            }
        )  # fmt: skip
        spans: dict[tuple[int, str], set[Span]] = {}
        for part, name, size, start, length in (one for rank in every for one in rank["pieces"]):
            if sizes.get(name) == size:  # else it belongs to another pipeline stage
                spans.setdefault((part, name), set()).add((start, length))
        unclear = {name for rank in every for name in rank["guessed"]}
        apart = {name for name in model if len({rank["prints"].get(name) for rank in every} - {None}) > 1}
        held: dict[int, list[HeldPiece]] = {}
        for (part, name), found in spans.items():
            for start, length in _refined(found):
                mine = next((p for k, p in own.items() if k[:2] == (part, name) and _covers(p, start, length)), None)
                held.setdefault(part, []).append(
                    HeldPiece(name, model[name], start, length, _cut(mine, start, length), name in unclear)
                )
        for part, each in held.items():
            self._layouts[owner, part] = MasterLayout(owner, each, apart)
            for one in each:
                self._spans.setdefault(id(one.parameter), []).append((one.start, one.length))

    def pass_ends(self) -> None:
        """Note which parameters have a gradient after a backward pass: a script may then free some of them."""
        if not self._has_offered and self._steps < TRIES:
            self._reached.update(id(one) for _, one in self._names.trainable() if one.grad is not None)

    def _has_a_share(self, optimizer: Optimizer) -> bool:
        """Return whether the only optimizer holds some of the model's parameters, and others have gradients, too.

        The optimizers of other ranks may step them, as with ZeRO 1 that a script divides by whole parameters.
        """
        own = set(map(id, parameters_of(optimizer)))
        return (
            len(list(self._optimizers)) == 1
            and bool(own)
            and all(map(self._names.knows, parameters_of(optimizer)))
            and not self._reached <= own
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        )

    def _offer(self, optimizer: Optimizer) -> None:
        """Tell the other ranks which parameters this one steps, and what values all of them have."""
        self._has_offered = True
        own = set(map(id, parameters_of(optimizer)))
        model = self._names.trainable()
        self._shares.offer(
            {
                "own": [name for name, one in model if id(one) in own],
                "reached": [name for name, one in model if id(one) in self._reached],
                "prints": {name: tensor_digest(one) for name, one in model},
            }
        )

    def _divide(self) -> None:
        """Find a layout of whole parameters, if every rank computes gradients of all, but steps only its own."""
        every = self._shares.offered()
        if not every:
            return  # not yet: by the second step, a rank has got the updates of all others
        self._is_decided = True
        stepped, prints = [name for one in every for name in one["own"]], every[0]["prints"]
        are_alike = None not in prints.values() and all(one["prints"] == prints for one in every)
        if (
            not are_alike
            or not stepped
            or len(list(self._optimizers)) != 1
            or any(sorted({*stepped} & {*one["reached"]}) != sorted(stepped) for one in every)
        ):
            return
        (optimizer,) = self._optimizers
        own = set(map(id, parameters_of(optimizer)))
        held = [
            HeldPiece(name, one, 0, size, Piece(one, 0, size, one, 0) if id(one) in own else None, is_guessed=False)
            for name, one in self._names.trainable()
            if name in stepped and (size := one.numel())
        ]
        owner, part = self._optimizers.place(self._optimizers.number(optimizer))
        self._layouts[owner, part] = MasterLayout(owner, held, (), is_divided=True)
        self._spans |= {id(one.parameter): [(0, one.length)] for one in held}

    def stale_before(self, number: int, layout: MasterLayout) -> dict[str, float]:
        """Return the pieces in which model and optimizer differed at the first, failed search, and by how much."""
        before = self._unknown.pop(number, None)
        if before is None:
            return {}
        far = {str(n): before.distance(piece) for n, piece in layout.known()}
        return {n: distance for n, distance in far.items() if distance}

    def _from_all(self, own: Any) -> list[Any]:
        """Return the values of all ranks, or nothing if a rank does not arrive."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return [own]
        try:
            return self._exchange.values(own)
        except AbsentRankError:
            return []

    def _may_hold_copies(self, optimizer: Optimizer, passes: Sequence[ArrivedGradients]) -> bool:
        parameters = parameters_of(optimizer)
        return (
            bool(parameters)
            and self._is_other(optimizer)
            and any(one.grad is not None for one in parameters)
            and any(one.whole for one in passes)
            and not any(id(one) in each.local for one in parameters for each in passes)
        )

    def _is_other(self, optimizer: Optimizer) -> bool:
        return not any(map(self._names.knows, parameters_of(optimizer)))


def _guessed(model: Sequence[Tensor], pieces: Sequence[Piece]) -> set[int]:
    """Return the ids of constant pieces, unless the pieces next to them belong to the neighbouring parameters."""
    numbers = {id(one): number for number, one in enumerate(model)}
    order = [numbers[id(one.parameter)] for one in pieces]
    constant = [bool((one.model_weights == one.model_weights[:1]).all()) for one in pieces]
    found = set()
    for index, piece in enumerate(pieces):
        beside = [other for other in (index - 1, index + 1) if 0 <= other < len(pieces)]
        steps = {(order[other] - order[index]) * (other - index) for other in beside}
        in_order = steps in ({1}, {-1}) and not all(constant[other] for other in beside)
        if constant[index] and not in_order:
            found.add(id(piece))
    return found


def _refined(spans: set[Span]) -> Iterator[Span]:
    """Yield the pieces into which its spans cut a parameter."""
    cuts = sorted({at for start, length in spans for at in (start, start + length)})
    for start, end in pairwise(cuts):
        if any(first <= start and end <= first + length for first, length in spans):
            yield start, end - start


def _covers(piece: Piece, start: int, length: int) -> bool:
    return piece.start <= start and start + length <= piece.start + piece.length


def _cut(piece: Piece | None, start: int, length: int) -> Piece | None:
    if piece is None:
        return None
    return replace(piece, start=start, length=length, offset=piece.offset + start - piece.start)


def _of_trainer() -> dict[str, Any]:
    """Return the attributes of the object whose method steps the optimizer, if it has ``clip_grad`` as DeepSpeed's.

    Besides this limit of the norm, it can have ``communication_data_type``, the dtype in which ranks sum gradients.
    """
    found = stepping_object(lambda one: isinstance(getattr(one, "__dict__", {}).get("clip_grad"), (int, float)))
    return {} if found is None else vars(found)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def pieces_of_megatron(model: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Piece]:
    """Return the pieces that parameters name in ``main_param``, and the pieces that can be found for other masters.

    With the distributed optimizer, only the optimizer knows where a piece begins. Without any ``main_param``, nothing
    is returned.
    """
    left = {id(one): one for one in masters}
    pieces: list[Piece] = []
    for one in model:
        noted: Any = one
        master = getattr(noted, "main_param", None)
        if master is not None and id(master) in left:
            start = _start_of(one) if getattr(noted, "main_param_sharded", False) else 0
            if start is None:
                return []
            pieces.append(Piece(one, start, master.numel(), left.pop(id(master)), 0))
    if not pieces or not left:
        return pieces
    noted_for = {id(one.parameter) for one in pieces}
    others = pieces_of([one for one in model if id(one) not in noted_for], list(left.values()))
    return [*pieces, *others] if others else []


def _start_of(parameter: Tensor) -> int | None:
    optimizer = stepping_object(lambda one: hasattr(type(one), "_get_model_param_range_map"))
    return None if optimizer is None else int(optimizer._get_model_param_range_map(parameter)["param"].start)


def stepping_object(has_what_is_needed: Callable[[Any], bool]) -> Any:
    """Return the object of the innermost running method for which the condition holds, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self")
        if own is not None and has_what_is_needed(own):
            return own
        frame = frame.f_back
    return None
