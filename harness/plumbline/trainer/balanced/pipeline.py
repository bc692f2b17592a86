"""Runs one stage of the pipeline: the forwards and backwards of a batch's micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plumbline.trainer.balanced.data_flow import Part
from plumbline.trainer.balanced.exchange import Exchange, Shape, shapes_of
from plumbline.trainer.balanced.interception import Interception
from plumbline.trainer.balanced.measurements import StageClock
from plumbline.trainer.balanced.pipeline_batches import indivisible
from plumbline.trainer.balanced.remote_tensor import is_remote
from plumbline.trainer.errors import MisconfigurationError
from plumbline.trainer.nested import batch_length, scatter, tensors_in
from plumbline.trainer.precision_plugins import PrecisionPlugin


@dataclass(frozen=True)
class Place:
    """The position of a rank: stage ``number`` of ``count`` in pipeline ``replica`` of ``replicas``.

    The ranks of a pipeline are consecutive.
    """

    number: int
    count: int
    replica: int = 0
    replicas: int = 1

    @property
    def first_rank(self) -> int:
        return self.replica * self.count

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.number == self.count - 1


@dataclass
class Passed:
    """A micro-batch between its forward and its backward on this stage.

    ``arrived`` are the shapes of the tensors received from the previous stage, ``gradients`` their gradients.
    ``departed`` are the sent tensors whose gradients the next stage sends back.
    """

    gradients: list[Tensor | None]
    arrived: list[Shape]
    departed: list[Tensor]


class Pipeline:
    """Runs this rank's stage of each batch.

    Neighboring stages exchange the tensors that cross the cut between them. A stage also passes on tensors that only
    later stages use. If several stages use a tensor, its gradients are summed on the way back. The schedule is 1F1B
    (Narayanan et al. 2019, PipeDream; synchronous as in Megatron-LM): a stage has at most as many micro-batches between
    forward and backward as there are stages from it to the end. The loss of a batch is the mean over its
    ``micro_batches``, of which each replica of the pipeline takes an equal share.
    """

    def __init__(
        self,
        place: Place,
        part: Part,
        micro_batches: int,
        interception: Interception,
        exchange: Exchange,
        precision: PrecisionPlugin,
    ) -> None:
        self.place, self.part, self.micro_batches = place, part, micro_batches
        self.interception, self.exchange, self.precision = interception, exchange, precision
        self.shapes: dict[Any, list[Any]] = {}
        self.clock = StageClock(exchange.device)

    def train(self, step: Callable[[Any], Tensor], batch: Any, share: int, key: Any) -> Tensor:
        """Add this replica's part of the gradients of the batch's mean loss / ``share``.

        ``step`` returns the loss of a micro-batch, and ``share`` is the number of batches in an optimizer step. ``key``
        distinguishes this step from others with batches of the same shapes. Returns the mean loss of this replica's
        micro-batches on the last stage, else 0.
        """
        mine = self.micro_batches // self.place.replicas
        micro_batches = split(batch, self.micro_batches)[self.place.replica * mine : (self.place.replica + 1) * mine]
        early = min(self.place.count - self.place.number - 1, len(micro_batches))
        between: deque[tuple[Passed, Tensor | None]] = deque()
        losses: list[Tensor] = []

        def forward(number: int) -> None:
            passed, loss = self._forward(step, micro_batches[number], key, train=True)
            if loss is not None:
                losses.append(loss.detach())
            between.append((passed, loss))

        def backward() -> None:
            passed, loss = between.popleft()
            self._backward(passed, None if loss is None else loss / (share * self.micro_batches), len(between))

        with self.clock.measure("batch"):
            for number in range(early):
                forward(number)
            for number in range(early, len(micro_batches)):
                forward(number)
                backward()
            while between:
                backward()
            self.exchange.finish()
        return torch.stack(losses).double().mean() if losses else torch.zeros((), device=self.exchange.device)

    def evaluate(self, step: Callable[[Any], Any], batch: Any, key: Any) -> Any:
        """Return the outputs of ``step`` for a whole batch on the last stage, None on other stages."""
        outputs = self._forward(step, batch, key, train=False)[1]
        self.exchange.wait_until_sent(forward=True, but=MOST_PENDING)
        return outputs

    def _forward(self, step: Callable[[Any], Any], batch: Any, key: Any, *, train: bool) -> tuple[Passed, Any]:
        number, key = self.place.number, (key, *shapes_of(tensors_in(batch)))
        known = key in self.shapes
        arriving: list[Tensor] = []
        if number:
            if not known:
                self.shapes[key] = [self.exchange.receive_shapes(number - 1), None]
            # In 1F1B, the previous stage receives all gradients except the last before it sends the next activations.
            self.exchange.wait_until_sent(forward=False, but=1)
            arriving = self.exchange.receive(self.shapes[key][0], number - 1, forward=True)
        gradients: list[Tensor | None] = [None] * len(arriving)
        shapes = shapes_of(arriving)
        inputs = [
            note_gradient(tensor, gradients, index) if train and carried.differentiable else tensor
            for index, (tensor, carried) in enumerate(zip(arriving, self.part.arriving, strict=True))
        ]
        with self.clock.measure("forward" if train else "evaluation"):
            outputs = self.interception.run(self.part, inputs, lambda: step(batch))
        if self.place.is_last:
            self.shapes.setdefault(key, [None, None])
            if any(is_remote(tensor) for tensor in tensors_in(outputs)):
                raise MisconfigurationError(
                    "The step's outputs depend on tensors that only an earlier stage computes: balanced needs the same "
                    "data flow for every batch, in training and validation."
                )
            return Passed(gradients, shapes, []), outputs
        if not known:
            self.exchange.send_shapes(outputs, number + 1)
            self.shapes.setdefault(key, [None, None])[1] = shapes_of(outputs)
        elif shapes_of(outputs) != self.shapes[key][1]:
            raise MisconfigurationError(
                f"Stage {number} sends tensors of shapes {shapes_of(outputs)}, but sent {self.shapes[key][1]} for "
                "another batch of the same shape: balanced needs shapes that follow from those of the batch."
            )
        self.exchange.send(outputs, number + 1, forward=True)
        departed = [
            tensor for tensor, one in zip(outputs, self.part.departing, strict=True) if train and one.differentiable
        ]
        return Passed(gradients, shapes, departed), None

    def _backward(self, passed: Passed, loss: Tensor | None, in_flight: int) -> None:
        if loss is not None:
            with self.clock.measure("backward"):
                self.precision.backward(loss)
        else:
            received = self.exchange.receive_gradients(shapes_of(passed.departed), self.place.number + 1)
            # The next stage sends a micro-batch's gradients after it has received the activations of this and all
            # earlier ones, so only those of the ``in_flight`` later ones can still be pending.
            self.exchange.wait_until_sent(forward=True, but=in_flight)
            pairs = [
                (tensor, gradient)
                for tensor, gradient in zip(passed.departed, received, strict=True)
                if tensor.requires_grad and gradient is not None
            ]
            if pairs:
                tensors, gradients = zip(*pairs, strict=True)
                with self.clock.measure("backward"):
                    torch.autograd.backward(tensors, gradients)
        if self.place.number:
            sent = [index for index, carried in enumerate(self.part.arriving) if carried.differentiable]
            self.exchange.send_gradients(
                [passed.gradients[place] for place in sent],
                [passed.arrived[place] for place in sent],
                self.place.number - 1,
            )


MOST_PENDING = 16
"""Maximum number of validation batches whose messages can be pending."""


class Arrival(torch.autograd.Function):
    """Adds a received tensor to the autograd graph and records its gradient. Blocks can change the tensor in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, gradients: list[Tensor | None], place: int) -> Tensor:
        ctx.gradients, ctx.place = gradients, place
        ctx.mark_dirty(tensor)  # otherwise autograd returns a view, which must not be changed in place
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.place] = gradients[0]
        return None, None, None, None


def note_gradient(tensor: Tensor, gradients: list[Tensor | None], place: int) -> Tensor:
    """Return ``tensor`` in a graph whose backward writes the tensor's gradient to ``gradients[place]``."""
    anchor = torch.empty(0, requires_grad=True)
    noted: Tensor = Arrival.apply(anchor, tensor, gradients, place)  # type: ignore[no-untyped-call]
    return noted


def split(batch: Any, micro_batches: int) -> Sequence[Any]:
    samples = batch_length(batch)
    if samples % micro_batches or not samples:
        raise MisconfigurationError(indivisible(samples, micro_batches))
    return [batch] if micro_batches == 1 else scatter(batch, micro_batches)
