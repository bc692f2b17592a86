"""A problem as plain torch, in source code: its data, loss, optimizers, and the steps that one device takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from plumbline.core.cell import Cell
from plumbline.core.finding import Finding
from plumbline.hunt.problems import OVER_SAMPLES
from plumbline.hunt.program.expressions import LOSSES, OPTIMIZERS, SCHEDULE, TARGETS
from plumbline.hunt.program.interruption import Interruption
from plumbline.hunt.program.kinds import COMPARES_WEIGHTS, IN_WORDS, kind_of
from plumbline.hunt.program.plain_model import NotExpressedError, PlainModel
from plumbline.workloads.generated import TEXT, Recipe

Share = tuple[int, ...]
"""The samples of one micro-batch of one rank."""

SCALE = 16.0
"""What programs multiply a loss by in float16."""


@dataclass(frozen=True)
class PlainTorch:
    """A recipe on a cell, and what was found, as the templates of programs use it.

    ``changed`` says, each in words after "it", what is not as it was found. ``by_samples``: micro-batches of unlike
    size weigh by their samples, and not alike; a trainer may do either.
    """

    recipe: Recipe
    cell: Cell
    finding: Finding
    changed: tuple[str, ...] = ()
    by_samples: bool = False

    @property
    def weighed_by_samples(self) -> PlainTorch:
        """The same, for a trainer whose micro-batches weigh by their samples."""
        return replace(self, by_samples=True)

    @property
    def check(self) -> str:
        """The check that fails."""
        return self.finding.check

    @property
    def kind(self) -> str:
        """What a program has to show, of ``kinds``."""
        return kind_of(self.recipe, self.finding)

    @property
    def differences(self) -> str:
        """What a program does not do as the problem that was found, in words after "it"; empty: nothing.

        What should change nothing of what is compared is left out.
        """
        left_out = []
        if self.recipe.validate_every is not None and self.kind in (*COMPARES_WEIGHTS, "loss", "broadcast"):
            left_out.append("evaluations")
        if self.recipe.interrupt_after is not None and self.kind != "resumed":
            left_out.append("the interruption")
        if self.recipe.shuffle and self.kind == "raised":
            left_out.append("shuffling")
        return ", ".join(["leaves out " + " and ".join(left_out)] * bool(left_out) + [*self.changed])

    @property
    def kind_in_words(self) -> str:
        """The same, as what a program would need."""
        return IN_WORDS[self.kind]

    @property
    def precision(self) -> str:
        """The name of the cell's precision."""
        return self.cell.precision

    @property
    def backend(self) -> str:
        """The name of the cell's backend."""
        return self.cell.backend

    @property
    def broke(self) -> bool:
        """Whether an exception is what was found, which a program has to show."""
        return self.check == "launch" or self.finding.cause == "interruption-broke"

    @property
    def find_unused(self) -> bool:
        """Whether DistributedDataParallel must look for parameters that a step leaves unused."""
        return self.ranks > 1 and not {"unused", "thawed"}.isdisjoint(self.recipe.layers)

    @property
    def epoch_loop(self) -> str:
        """The head of the loop over epochs."""
        return f"for _ in range({self.recipe.epochs}):"

    @property
    def interruption(self) -> Interruption:
        """Where training is interrupted.

        Raises:
            NotExpressedError: it is not.
        """
        if self.recipe.interrupt_after is None:
            raise NotExpressedError("a checkpoint of a training that is not interrupted")
        return Interruption(self.recipe, self.names)

    @property
    def ranks(self) -> int:
        """Processes of the training."""
        return self.cell.processes

    @property
    def shares(self) -> int:
        """How many ranks have samples of their own."""
        return len(self.cell.contract.replicas(self.cell.topology))

    @property
    def batch(self) -> int:
        """Samples of one micro-batch on one rank."""
        devices = self.cell.topology.devices
        return ceil(self.recipe.batch_size / devices) * devices // self.shares

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        size = self.batch * self.shares
        most = size - self.cell.topology.devices if self.recipe.steps_per_epoch > 1 else 0
        return self.recipe.steps_per_epoch * size - min(self.recipe.left_out, most)

    @property
    def rows(self) -> int:
        """Samples of ``data``: those of an epoch; where a validation loss is shown, the held-out ones."""
        if self.kind != "val_loss":
            return self.samples
        if self.recipe.loss not in OVER_SAMPLES:
            raise NotExpressedError("a loss that is no mean over samples, of which no mean is right")
        return self.batch * self.shares + 5  # a multiple of nothing, as of every workload

    @property
    def draws(self) -> int:
        """How many samples all ranks together have in an epoch, with those that make their shares equal."""
        return ceil(self.samples / self.shares) * self.shares

    @property
    def shuffles(self) -> bool:
        """Whether what a program trains on is shuffled: one device could not do the same by hand."""
        return self.recipe.shuffle and self.kind in ("samples", "resumed", "loss", "broadcast")

    @property
    def in_order(self) -> str:
        """The samples of each batch of an epoch, over all ranks, where nothing is shuffled, as an expression."""
        size, draws, samples = self.batch * self.ranks, self.draws, self.samples
        end = f"first + {size}" if draws % size == 0 else f"min(first + {size}, {draws})"
        batch = f"[*range(first, {end})]"
        if draws > samples:  # the first samples fill up the last shares
            batch = f"sorted(sample % {samples} for sample in range(first, {end}))"
        return f"[{batch} for first in range(0, {draws}, {size})]"

    @property
    def names(self) -> str:
        """The columns of a batch, as a loop unpacks them."""
        return "x, y, target" if self.recipe.loss == "two" else "x, y"

    @property
    def quoted_names(self) -> str:
        """The same, each in quotes."""
        return ", ".join(f'"{name}"' for name in self.names.split(", "))

    @cached_property
    def model(self) -> PlainModel:
        """The model."""
        return PlainModel(self.recipe, self.precision)

    @property
    def data(self) -> str:
        """The columns of all samples, as arguments of ``TensorDataset``."""
        columns = [self.model.inputs(self.rows), *TARGETS[self.recipe.loss](self.rows)]
        return ", ".join(_double(one) if self.cell.precision == "64" and "randn" in one else one for one in columns)

    def loss(self, outputs: str, batch: Sequence[str] = ("x", "y", "target")) -> str:
        """Return the loss of a batch, as an expression over the model's ``outputs`` and the columns of the batch."""
        loss = LOSSES[self.recipe.loss]
        if self.recipe.returns == "nested":
            taken = loss(f'(outputs := {outputs})["logits"]', 'outputs["logits"]', *batch[1:])
            return f'{taken} + 0.1 * outputs["rest"][0].square().mean()'
        return loss(f"(outputs := {outputs})" if self.recipe.loss == "two" else outputs, "outputs", *batch[1:])

    def windows(self, batches: str) -> str:
        """Return the micro-batches of each optimizer step of an epoch, as an expression over a list of batches."""
        length, count = self.recipe.accumulate, self.recipe.steps_per_epoch
        slices = [f"{batches}[{first}:{min(first + length, count)}]" for first in range(0, count, length)]
        return _tuple(slices)

    @property
    def divisor(self) -> str | None:
        """What one device divides the loss of a share by; None where a step is one batch."""
        return None if self.joined else "len(shares)"

    def backward(self, loss: str, divisor: str | None = None) -> str:
        """Return the backward of a loss, divided or not."""
        if divisor or " + " in loss:
            return f"({self.divided(loss, divisor) if divisor else loss}).backward()"
        return f"{loss}.backward()"

    def divided(self, loss: str, divisor: str) -> str:
        """Return a loss that is divided."""
        return f"({loss}) / {divisor}" if " + " in loss else f"{loss} / {divisor}"

    @property
    def several(self) -> bool:
        """Whether there is more than one optimizer."""
        return self.recipe.optimizer == "several"

    def optimizer(self, model: str) -> str:
        """Return the lines that make ``optimizer``, or ``optimizers`` where there are several, of a model's weights."""
        return OPTIMIZERS[self.recipe.optimizer].format(model=model)

    def in_shards(self, lines: str) -> str:
        """Return the lines that make optimizers, with the state of each divided among the ranks."""
        return re.sub(r"(torch\.optim\.\w+)\((.+?), ", r"ZeroRedundancyOptimizer(\2, \1, ", lines)

    @property
    def mesh(self) -> str:
        """The sizes of the mesh of processes, outermost first, and their names, as arguments of a DeviceMesh."""
        mesh = self.cell.contract.mesh(self.cell.topology)
        names = ", ".join(f'"{name}"' for name in mesh.names)
        return f"{mesh.shape}, mesh_dim_names=({names})" if len(mesh.names) > 1 else str(mesh.shape)

    @property
    def scheduled(self) -> bool:
        """Whether learning rates follow a schedule."""
        return self.recipe.schedule != "none"

    @property
    def schedule(self) -> str | None:
        """The schedule of the one ``optimizer``, as an expression; None: there is none.

        Raises:
            NotExpressedError: there are several optimizers; see ``schedules``.
        """
        if not self.scheduled:
            return None
        if self.several:
            raise NotExpressedError("several optimizers with a schedule each")
        return SCHEDULE.format("optimizer")

    @property
    def schedules(self) -> str:
        """The line that makes ``schedule``, or ``schedules`` of several optimizers; empty: there is none."""
        if not self.scheduled:
            return ""
        if self.several:
            return f"schedules = [{SCHEDULE.format('one')} for one in optimizers]"
        return f"schedule = {self.schedule}"

    @property
    def stepping(self) -> str:
        """The lines that step, with the schedules where there are any, and forget the gradients."""
        lines = ["optimizer.step()"]
        if self.kind != "raised" or self.recipe.steps > 1:
            lines.append("optimizer.zero_grad()")
        if self.scheduled:
            lines.append("schedule.step()")
        if not self.several:
            return "\n".join(lines)
        head = "for optimizer in optimizers:"
        if self.scheduled:
            head = "for optimizer, schedule in zip(optimizers, schedules, strict=True):"
        return "\n".join([head, *("    " + line for line in lines)])

    @property
    def scaler(self) -> str | None:
        """The scaler of the loss, as an expression; None: there is none.

        Its scale is one at which no gradient overflows: no step is skipped. Where an exception is to be seen, it is
        the one that users have.
        """
        if self.precision != "16":
            return None
        return f'torch.amp.GradScaler("cpu"{"" if self.kind == "raised" else f", init_scale={SCALE:.1f}"})'

    def steps(self, interleaved: bool) -> str:
        """Return what one device trains on, a batch or a tuple of batches a step, as an expression over ``data``.

        Args:
            interleaved: rank r of n has samples r, r + n, …; else ranks have whole batches in turn.

        Raises:
            NotExpressedError: the order is the trainer's own.
        """
        if self.recipe.shuffle:
            raise NotExpressedError("shuffled samples, whose order is the trainer's own")
        steps = self.windows_of(interleaved)
        if self.joined:
            batches = [_rows(sorted(sample for share in shares for sample in share)) for shares in steps]
        else:
            batches = [_tuple(map(_rows, shares)) for shares in steps]
        return f"{self.recipe.epochs} * {_tuple(batches)}" if self.recipe.epochs > 1 else _tuple(batches)

    @property
    def joined(self) -> bool:
        """Whether all samples of a step can be one batch: its loss is the mean over them, or over all their labels."""
        if self.recipe.inputs == TEXT:
            return True
        shares = [share for step in self.windows_of(True) for share in step]
        if len(shares) == len(self.windows_of(True)):
            return True
        alike = self.by_samples or self.samples % (self.batch * self.shares) == 0
        return alike and self.recipe.loss in OVER_SAMPLES and "batchnorm" not in self.recipe.layers

    def windows_of(self, interleaved: bool) -> list[list[Share]]:
        """Return the shares of each optimizer step of an epoch: those of all ranks and micro-batches.

        ``interleaved`` is as for ``steps``.
        """
        at_once = self.batch * self.shares
        multiple = self.shares if interleaved or self.shares == 1 else at_once
        whole = ceil(self.samples / multiple) * multiple
        order = [number % self.samples for number in range(whole)]  # the first samples fill up the last shares
        micro_batches = []
        for first in range(0, whole, at_once):
            batch = order[first : first + at_once]
            if interleaved:
                shares = [tuple(batch[rank :: self.shares]) for rank in range(self.shares)]
            else:
                shares = [tuple(batch[rank * self.batch : (rank + 1) * self.batch]) for rank in range(self.shares)]
            micro_batches.append(shares)
        length = self.recipe.accumulate
        windows = [micro_batches[first : first + length] for first in range(0, len(micro_batches), length)]
        return [[share for shares in window for share in shares] for window in windows]


def _tuple(parts: Iterable[str]) -> str:
    """Return a tuple of expressions as it is written."""
    every = list(parts)
    return f"({', '.join(every)}{',' if len(every) == 1 else ''})"


def _rows(samples: list[int] | Share) -> str:
    """Return the samples of ``data`` as a batch."""
    step = samples[1] - samples[0] if len(samples) > 1 else 1
    if step < 1 or list(samples) != list(range(samples[0], samples[-1] + 1, step)):
        return f"data[{list(samples)}]"
    return f"data[{samples[0]}:{samples[-1] + 1}{f':{step}' if step > 1 else ''}]"


def _double(expression: str) -> str:
    return f"({expression}).double()" if " * " in expression else f"{expression}.double()"
