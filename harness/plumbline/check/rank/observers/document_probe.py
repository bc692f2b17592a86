"""Runs a forward again with one document's tokens changed, and finds the module through which others change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plumbline.check.rank.observers.document_layout import PADDING, DocumentLayout
from plumbline.recording.backward_passes import in_backward
from plumbline.recording.patching import attempt
from plumbline.replay.call import TrackedCall
from plumbline.replay.nested import map_tensors, tensors_in
from plumbline.replay.parameter_copies import ParameterCopies
from plumbline.replay.precision import ReplayPrecision
from plumbline.replay.random_state import normal, normal_like
from plumbline.replay.replay import forward_watched


@dataclass(frozen=True)
class Moved:
    """The first module whose output moves at positions of other documents although its inputs do not move there.

    Of ``of`` such positions, ``positions`` move in its output, by at most ``share`` relative to their size. ``shares``:
    the module takes statistics of all tokens, or sends tokens to experts that all documents share. ``of_zeros``: its
    inputs were zeros before the change. ``embeds``: vectors are looked up by document number. ``of_gradients``: no
    output moves, but the gradients of tokens do; the module is the first whose inputs' gradients move.
    """

    module: str
    kind: str
    positions: int
    of: int
    share: float
    shares: bool = False
    of_zeros: bool = False
    embeds: bool = False
    of_gradients: bool = False


_Gradients = dict[int, "Tensor | None"]


@dataclass(eq=False)
class _Seen:
    """A call of a module: its path, and samples of its inputs and outputs at each position, None without.

    ``shared``: samples of the tensors that it takes statistics of or selects by, None if these have no value for each
    position. ``arrived``: samples of the gradients of its inputs and of its outputs, by the numbers of these tensors.
    """

    path: str
    time: int
    module: nn.Module
    given: Tensor | None
    made: Tensor | None
    limit: float = 0.0
    shared: list[Tensor | None] = field(default_factory=list)
    arrived: tuple[_Gradients, _Gradients] = field(default_factory=lambda: ({}, {}))

    @property
    def key(self) -> tuple[str, int]:
        """The key of the same call in another run: the module's path, and how often the module has run."""
        return self.path, self.time


class DocumentProbe:
    """Runs a call with and without a change at ``changed`` positions (rows, positions), and finds what moves.

    In each run, one and the same gradient goes backward from the outputs at all positions except padding.
    ``has_gradients``: a gradient has arrived at the tokens.
    """

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
        """``drawn``: see ``forward_watched``. ``by_row``: single values for a whole row must not move, either."""
        self._drawn, self._samples = drawn, PositionSamples(*layout.shape, by_row=by_row)
        self._call, self._layout, self._precision, self._copies = call, layout, precision, copies
        self._paths = {module: name for name, module in call.module.named_modules()}
        self._changed: Tensor | None = None
        self._seen: list[_Seen] = []
        self._stack: list[_Seen] = []
        self._is_embedded = self._is_of_zeros = self._embeds_documents = False
        self._times: dict[str, int] = {}
        self._embedding: nn.Module | None = None
        self._embedded: Tensor | None = None
        self._gradient: Tensor | None = None
        self.has_gradients = False

    @property
    def limit(self) -> float:
        """The smallest change of an output, relative to its size, that counts as a move: half of the digits."""
        return max((one.limit for one in self._seen), default=0.0)

    def moved(self, changed: Tensor, others: Tensor) -> Moved | None:
        """Return where a change reaches ``others``, None if it does not.

        Raises:
            LookupError: no module turns the tokens into vectors.
            Exception: the call cannot be run again.
        """
        before, gradient = self._run(None), self._gradient
        after = self._run(changed)
        if not self._is_embedded:
            raise LookupError("no module turns the tokens into vectors")
        changes = {one.key: one for one in after}
        pairs = [(one, changes[one.key]) for one in before if one.key in changes]  # experts may run in only one
        for one, other in pairs:
            apart = distances(one.made, other.made, others)
            if apart is None or not bool((apart > one.limit).any()) or move(one.given, other.given, others, one.limit):
                continue
            shared = zip(one.shared, other.shared, strict=False)
            return Moved(
                module=one.path,
                kind=type(one.module).__name__,
                positions=int((apart > one.limit).sum()),
                of=int(others.sum()),
                share=float(apart.max()),
                shares=any(each is None or move(each, now, others, one.limit) is False for each, now in shared),
                of_zeros=self._is_of_zeros and (one.given is None or not bool(one.given[changed].any())),
                embeds=self._embeds_documents,
            )
        apart = distances(gradient, self._gradient, others)
        self.has_gradients = apart is not None
        if apart is None or not bool((apart > self.limit).any()):
            return None
        first = next((one for one, other in pairs if _turns(one, other, others)), None)
        return Moved(
            module="" if first is None else first.path,
            kind=type(self._call.module if first is None else first.module).__name__,
            positions=int((apart > self.limit).sum()),
            of=int(others.sum()),
            share=float(apart.max()),
            embeds=self._embeds_documents,
            of_gradients=True,
        )

    def _run(self, changed: Tensor | None) -> list[_Seen]:
        self._changed, self._seen, self._stack, self._is_embedded = changed, [], [], False
        self._times, self._embedded, self._gradient = {}, None, None
        with shared_statistics(self._shared):
            forward_watched(
                self._call, self._precision, self._copies, self._called, self._drawn, partial(attempt, self._go_back)
            )
        return self._seen

    def _go_back(self, outputs: Sequence[Tensor]) -> None:
        """Compute the gradient of the tokens. It stays the same at positions that are independent of the change."""
        real = (self._layout.documents != PADDING).unsqueeze(-1)
        given = [at for one in outputs if (at := self._samples.at_positions(one)) is not None]
        if self._embedded is None or not given:
            return
        generator = torch.Generator().manual_seed(len(given))
        cotangents = [normal_like(one, generator) for one in given]
        (gradient,) = torch.autograd.grad(
            given, [self._embedded], [one * real for one in cotangents], allow_unused=True
        )
        self._gradient = self._samples.of(gradient)

    def _followed(self, value: Any, gradients: _Gradients) -> Any:
        """Return a value with views in place of its tensors, for one call, and keep samples of their gradients."""

        def follow(tensor: Tensor) -> Tensor:
            if type(tensor) is not Tensor or not tensor.requires_grad or self._samples.at_positions(tensor) is None:
                return tensor
            place, own = len(gradients), tensor.view_as(tensor)
            gradients[place] = None
            register: Any = own.register_hook
            register(lambda gradient: gradients.__setitem__(place, self._samples.of(gradient)))
            return own

        return map_tensors(value, follow)

    def _shared(self, given: Tensor | None, *, by_token: bool) -> None:
        """Note the values that statistics are taken of. Scores count only with one for each token, in either order."""
        if given is None:
            for one in self._stack[-1:]:
                one.shared.append(None)
            return
        sample = next((found for each in (given, given.mT) if (found := self._samples.of(each)) is not None), None)
        for one in self._stack if sample is not None or not by_token else ():
            one.shared.append(sample)

    def _called(self, run: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_backward():  # a checkpoint recomputes its forward, with the same change
            output = run(module, *args, **kwargs)
            return self._embedded.clone() if module is self._embedding and self._embedded is not None else output
        path = self._paths.get(module, "")
        time = self._times[path] = self._times.get(path, 0) + 1
        one = _Seen(path, time, module, self._samples.of((args, kwargs)), None)
        if not self._stack and self._layout.tokens.is_floating_point():
            args, kwargs = map_tensors((args, kwargs), self._changed_input)
        args, kwargs = self._followed((args, kwargs), one.arrived[0])
        self._stack.append(one)
        try:
            output = run(module, *args, **kwargs)
        finally:
            self._stack.pop()
        if not self._is_embedded and self._embeds(args, output):
            self._embedding = module
            return self._with_change(output)
        self._embeds_documents = self._embeds_documents or self._are_documents(args, output)
        one.made = self._samples.of(output)
        eps = max((torch.finfo(made.dtype).eps for made in vectors(output)), default=0.0)
        one.limit = math.sqrt(max(eps, self._call.eps if self._precision is ReplayPrecision.NATIVE else 0.0))
        self._seen.append(one)
        return self._followed(output, one.arrived[1])

    def _embeds(self, args: tuple[Any, ...], output: Any) -> bool:
        tokens = self._layout.tokens
        given = args[0] if args else None
        if tokens.is_floating_point() or not isinstance(given, Tensor) or not isinstance(output, Tensor):
            return False
        is_given = given.numel() == tokens.numel() and given.dtype == tokens.dtype and output.is_floating_point()
        return is_given and output.shape[:-1] == given.shape and bool((given.reshape(tokens.shape) == tokens).all())

    def _are_documents(self, args: tuple[Any, ...], output: Any) -> bool:
        """Return whether a module looks up vectors by document number: it reads the numbers themselves."""
        documents, given = self._layout.documents, args[0] if args else None
        if not isinstance(given, Tensor) or given.is_floating_point() or given.numel() != documents.numel():
            return False
        if not isinstance(output, Tensor) or output.shape[:-1] != given.shape:
            return False
        return bool(((given.reshape(documents.shape) == documents) | (documents == PADDING)).all())

    def _with_change(self, output: Tensor) -> Tensor:
        """Return the vectors of the tokens, with the change if there is one, as tensors at which gradients arrive."""
        self._is_embedded, output = True, output.detach()
        if self._changed is not None:
            where = self._changed.reshape(output.shape[:-1]).unsqueeze(-1)
            self._is_of_zeros = not bool(output[where.squeeze(-1)].any())
            output = torch.where(where, output.flip(-1) * 1.5 + output.std(), output)
        self._embedded = output.requires_grad_()
        return self._embedded.clone()  # what follows may write to it

    def _changed_input(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the change if it has the token vectors that are given to the model itself."""
        tokens = self._layout.tokens
        if tensor.shape != tokens.shape or not torch.equal(tensor.detach().to(tokens.dtype), tokens):
            return tensor
        return self._with_change(tensor)


def _turns(one: _Seen, other: _Seen, others: Tensor) -> bool:
    """Return whether gradients move at a module's inputs, but not at its outputs."""
    leave, arrive = (
        any(move(gradients.get(place), now.get(place), others, one.limit) for place in gradients)
        for gradients, now in zip(one.arrived, other.arrived, strict=True)
    )
    return leave and not arrive


_NUMBERS = 4
"""Number of random projections that are kept of the values at each position."""

_VECTORS = 4
"""The most tensors of an argument list or an output that are sampled."""


class PositionSamples:
    """Takes samples (rows, positions, numbers). ``by_row``: a value for a whole row counts at each position of it."""

    def __init__(self, rows: int, length: int, *, by_row: bool = False) -> None:
        self._rows, self._length, self._by_row = rows, length, by_row

    def of(self, value: Any) -> Tensor | None:
        """Return projections of the tensors in a value that have a vector at each position, None if none has."""
        found = [at for one in vectors(value) if (at := self.at_positions(one.detach())) is not None]
        samples = [torch.matmul(at.double(), _directions(at.shape[-1], at.device)) for at in found[:_VECTORS]]
        return torch.cat(samples, -1) if samples else None

    def at_positions(self, one: Tensor) -> Tensor | None:
        """Return the vectors (rows, positions, size) of a tensor with one at each position, None for other tensors."""
        rows, length = self._rows, self._length
        if length in one.shape[2:] or not one.numel():
            return None  # attention weights, or another order of dimensions: no vectors at positions
        if one.dim() > 2 and tuple(one.shape[:2]) == (rows, length):
            return one.reshape(rows, length, -1)
        if one.dim() > 2 and tuple(one.shape[:2]) == (length, rows):
            return one.movedim(0, 1).reshape(rows, length, -1)
        if one.dim() == 2 and len(one) == rows * length:
            return one.reshape(rows, length, -1)
        if self._by_row and one.dim() == 2 and len(one) == rows:
            return one[:, None].repeat(1, length, 1)
        return None


def vectors(value: Any) -> Iterator[Tensor]:
    """Yield the plain floating-point tensors in a value."""
    return (one for one in tensors_in(value) if type(one) in (Tensor, nn.Parameter) and one.is_floating_point())


def distances(one: Tensor | None, other: Tensor | None, where: Tensor) -> Tensor | None:
    """Return the distance of samples at each position of ``where``, relative to their size over all of these."""
    if one is None or other is None or one.shape != other.shape:
        return None
    size = torch.linalg.vector_norm(one[where]) / max(1, int(where.sum())) ** 0.5
    apart = torch.where(where, torch.linalg.vector_norm(one - other, dim=-1), 0.0)
    found: Tensor = apart / size.clamp(min=torch.finfo(torch.float64).tiny)
    return found


def move(one: Tensor | None, other: Tensor | None, where: Tensor, limit: float) -> bool | None:
    """Return whether samples differ by more than a limit anywhere in ``where``, None if they cannot be compared."""
    apart = distances(one, other, where)
    return None if apart is None else bool((apart > limit).any())


def _directions(size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return normal((size, _NUMBERS), generator).to(device)


_NORMS = ("group_norm", "instance_norm")
_SCALED = ("round", "round_", "fake_quantize_per_tensor_affine", "fused_moving_avg_obs_fake_quant")
"""Functions that quantise: they have one scale for all tokens."""

_SELECTIONS = ("topk", "argmax", "sort", "argsort", "multinomial")
_TRAINING = 5
"""The place of ``training`` among the arguments of ``batch_norm``."""


class Shared(Protocol):
    """Takes a tensor with shared statistics, None for scaled values, or with ``by_token`` a selection's scores."""

    def __call__(self, given: Tensor | None, *, by_token: bool) -> None: ...


class shared_statistics(TorchFunctionMode):  # noqa: N801
    """Tells ``shared`` what the block computes from all tokens together on purpose: statistics, scales, selections."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self._shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and given.is_floating_point() and given.dim() > 1:
            if name in _SCALED:
                self._shared(None, by_token=False)
            elif name in _NORMS or (name == "batch_norm" and _trains(args, kwargs)):
                self._shared(given.detach(), by_token=False)
            elif name in _SELECTIONS or (name == "max" and _has_dimension(args, kwargs)):
                self._shared(given.detach(), by_token=True)
        return func(*args, **kwargs)


def _trains(args: Any, kwargs: Any) -> bool:
    return bool(args[_TRAINING] if len(args) > _TRAINING else kwargs.get("training"))


def _has_dimension(args: Any, kwargs: Any) -> bool:
    return type(args[1] if len(args) > 1 else kwargs.get("dim")) is int
