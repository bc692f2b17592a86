"""Runs a recorded forward again with the tokens of one document changed, and says which module lets others notice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plumbline.check.rank.observers.document_layout import PADDING, DocumentLayout
from plumbline.check.rank.observers.shared_statistics import shared_statistics
from plumbline.replay.call import TrackedCall
from plumbline.replay.nested import map_tensors, tensors_in
from plumbline.replay.parameter_copies import ParameterCopies
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.replay import forward_watched

_NUMBERS = 4
"""Random projections that are kept of the values at each position."""

_VECTORS = 4
"""Tensors of an argument list or an output that are looked at, at most."""


@dataclass(frozen=True)
class Moved:
    """The first module whose output moves at positions of other documents although its inputs do not move there.

    ``positions`` of ``of`` such positions move in its output, ``share`` is by how much, relative to what they are.
    ``shares``: it takes statistics of all tokens, or sends tokens to experts that all documents share. ``of_zeros``:
    what moves it were zeros before the change. ``embeds``: vectors are looked up by the numbers of the documents.
    """

    module: str
    kind: str
    positions: int
    of: int
    share: float
    shares: bool
    of_zeros: bool
    embeds: bool


@dataclass(eq=False)
class _Seen:
    """A module that has run: its path and samples of what went in and came out at each position, None without.

    ``shared`` has samples of what it takes statistics of, or selects by, None where that is not known at each position.
    """

    path: str
    time: int
    module: nn.Module
    given: Tensor | None
    made: Tensor | None
    limit: float = 0.0
    shared: list[Tensor | None] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """What it is known by in another run: its path, and how often it had run before."""
        return self.path, self.time


class DocumentProbe:
    """Forwards of a call with and without a change at ``changed`` positions (rows, positions), and what moves."""

    def __init__(
        self,
        call: TrackedCall,
        layout: DocumentLayout,
        precision: ReplayPrecision,
        copies: ParameterCopies,
        drawn: list[torch.dtype] | None = None,
        *,
        by_row: bool = False,
    ) -> None:
        """``drawn``: see ``forward_watched``. ``by_row``: what is one value for a whole row may not move either."""
        self._drawn, self._by_row = drawn, by_row
        self._call, self._layout, self._precision, self._copies = call, layout, precision, copies
        self._paths = {module: name for name, module in call.module.named_modules()}
        self._changed: Tensor | None = None
        self._seen: list[_Seen] = []
        self._stack: list[_Seen] = []
        self._is_embedded = self._is_of_zeros = self._embeds_documents = False
        self._times: dict[str, int] = {}

    @property
    def limit(self) -> float:
        """By how much, relative to its size, an output moves at least that is said to move: half of the digits."""
        return max((one.limit for one in self._seen), default=0.0)

    def moved(self, changed: Tensor, others: Tensor) -> Moved | None:
        """Return where a change reaches ``others``, None where it does not.

        Raises:
            LookupError: no module turns the tokens into vectors.
            Exception: the call cannot be run again.
        """
        before, after = self._run(None), self._run(changed)
        if not self._is_embedded:
            raise LookupError("no module turns the tokens into vectors")
        changes = {one.key: one for one in after}
        for one in before:
            other = changes.get(one.key)  # what runs may depend on the values, as experts do
            apart = None if other is None else _apart(one.made, other.made, others)
            if other is None or apart is None or not bool((apart > one.limit).any()):
                continue
            given = _apart(one.given, other.given, others)
            if given is not None and bool((given > one.limit).any()):
                continue
            pairs = zip(one.shared, other.shared, strict=False)
            return Moved(
                module=one.path,
                kind=type(one.module).__name__,
                positions=int((apart > one.limit).sum()),
                of=int(others.sum()),
                share=float(apart.max()),
                shares=any(_is_intact(*pair, others, one.limit) for pair in pairs),
                of_zeros=self._is_of_zeros and (one.given is None or not bool(one.given[changed].any())),
                embeds=self._embeds_documents,
            )
        return None

    def _run(self, changed: Tensor | None) -> list[_Seen]:
        self._changed, self._seen, self._stack, self._is_embedded = changed, [], [], False
        self._times = {}
        with shared_statistics(self._shared):
            forward_watched(self._call, self._precision, self._copies, self._called, self._drawn)
        return self._seen

    def _shared(self, given: Tensor | None, *, by_token: bool) -> None:
        """Note what statistics are taken of; scores only where there are some for each token, in either order."""
        if given is None:
            for one in self._stack[-1:]:
                one.shared.append(None)
            return
        sample = next((found for each in (given, given.mT) if (found := self._sample(each)) is not None), None)
        for one in self._stack if sample is not None or not by_token else ():
            one.shared.append(sample)

    def _called(self, run: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths.get(module, "")
        time = self._times[path] = self._times.get(path, 0) + 1
        one = _Seen(path, time, module, self._sample((args, kwargs)), None)
        if not self._stack and self._layout.tokens.is_floating_point():
            args, kwargs = map_tensors((args, kwargs), self._changed_input)
        self._stack.append(one)
        try:
            output = run(module, *args, **kwargs)
        finally:
            self._stack.pop()
        if not self._is_embedded and self._embeds(args, output):
            self._is_embedded = True
            return output if self._changed is None else self._with_change(output)
        self._embeds_documents = self._embeds_documents or self._are_documents(args, output)
        one.made = self._sample(output)
        eps = max((torch.finfo(made.dtype).eps for made in _vectors(output)), default=0.0)
        one.limit = math.sqrt(max(eps, self._call.eps if self._precision is ReplayPrecision.NATIVE else 0.0))
        self._seen.append(one)
        return output

    def _embeds(self, args: tuple[Any, ...], output: Any) -> bool:
        """Say whether a module has turned the tokens themselves into vectors."""
        tokens = self._layout.tokens
        given = args[0] if args else None
        if tokens.is_floating_point() or not isinstance(given, Tensor) or not isinstance(output, Tensor):
            return False
        is_given = given.numel() == tokens.numel() and given.dtype == tokens.dtype and output.is_floating_point()
        return is_given and output.shape[:-1] == given.shape and bool((given.reshape(tokens.shape) == tokens).all())

    def _are_documents(self, args: tuple[Any, ...], output: Any) -> bool:
        """Say whether a module looks vectors up by the numbers of the documents: they are read, not only kept apart."""
        documents, given = self._layout.documents, args[0] if args else None
        if not isinstance(given, Tensor) or given.is_floating_point() or given.numel() != documents.numel():
            return False
        if not isinstance(output, Tensor) or output.shape[:-1] != given.shape:
            return False
        return bool(((given.reshape(documents.shape) == documents) | (documents == PADDING)).all())

    def _with_change(self, output: Tensor) -> Tensor:
        assert self._changed is not None
        self._is_of_zeros = not bool(output.detach()[self._changed.reshape(output.shape[:-1])].any())
        where = self._changed.reshape(output.shape[:-1]).unsqueeze(-1)
        return torch.where(where, output.flip(-1) * 1.5 + output.detach().std(), output)

    def _changed_input(self, tensor: Tensor) -> Tensor:
        """Return vectors of tokens that are given to the model itself with the change."""
        tokens = self._layout.tokens
        if tensor.shape != tokens.shape or not torch.equal(tensor.detach().to(tokens.dtype), tokens):
            return tensor
        self._is_embedded = True
        return tensor if self._changed is None else self._with_change(tensor)

    def _sample(self, value: Any) -> Tensor | None:
        """Return projections (rows, positions, numbers) of the vectors in a value that stand at all positions."""
        found = [at for one in _vectors(value) if (at := self._at_positions(one.detach())) is not None]
        samples = [torch.matmul(at.double(), _directions(at.shape[-1], at.device)) for at in found[:_VECTORS]]
        return torch.cat(samples, -1) if samples else None

    def _at_positions(self, one: Tensor) -> Tensor | None:
        rows, length = self._layout.shape
        if length in one.shape[2:] or not one.numel():
            return None  # weights of attention, or another order: not what is known at each position
        if one.dim() > 2 and tuple(one.shape[:2]) == (rows, length):
            return one.reshape(rows, length, -1)
        if one.dim() > 2 and tuple(one.shape[:2]) == (length, rows):
            return one.movedim(0, 1).reshape(rows, length, -1)
        if one.dim() == 2 and len(one) == rows * length:
            return one.reshape(rows, length, -1)
        if self._by_row and one.dim() == 2 and len(one) == rows:
            return one[:, None].repeat(1, length, 1)
        return None


def _vectors(value: Any) -> Iterator[Tensor]:
    return (one for one in tensors_in(value) if type(one) in (Tensor, nn.Parameter) and one.is_floating_point())


def _directions(size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, _NUMBERS, generator=generator, dtype=torch.float64).to(device)


def _apart(one: Tensor | None, other: Tensor | None, where: Tensor) -> Tensor | None:
    """Return by how much values differ at each position of ``where``, relative to what they are at all of these."""
    if one is None or other is None or one.shape != other.shape:
        return None
    size = torch.linalg.vector_norm(one[where]) / max(1, int(where.sum())) ** 0.5
    apart = torch.where(where, torch.linalg.vector_norm(one - other, dim=-1), 0.0)
    found: Tensor = apart / size.clamp(min=torch.finfo(torch.float64).tiny)
    return found


def _is_intact(one: Tensor | None, other: Tensor | None, others: Tensor, limit: float) -> bool:
    """Say whether what is shared was the same at other positions before it was shared: what moves is its result."""
    apart = _apart(one, other, others)
    return one is None or (apart is not None and not bool((apart > limit).any()))


def first_documents(layout: DocumentLayout) -> tuple[Tensor, Tensor]:
    """Return the positions of the first document of each row with several, and those of the row's other documents."""
    documents = layout.documents
    real = documents != PADDING
    first = documents.gather(1, real.long().argmax(1, keepdim=True))
    others = real & (documents != first)
    several = others.any(1, keepdim=True)
    return real & (documents == first) & several, others
