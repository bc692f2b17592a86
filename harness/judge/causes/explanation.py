"""What an explanation is, and what a prediction may be made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.core.precision import Precision
from harness.evidence.trace import Step, Tensors
from harness.judge.oracle import epochs as positions
from harness.judge.oracle.layout import Layout, draws
from harness.judge.oracle.noise import distance, norm
from harness.judge.oracle.oracle import Oracle, mean_gradient
from harness.judge.trace_analysis import ExpectedGradients, TraceAnalysis, same
from harness.workloads import Columns

Parts = list[list[Tensors]]
"""The gradient of each group alone, by micro-batch."""

CONCLUSIVE = 4
"""A fit says something where there are so many times as many equations as unknowns."""


class Counterfactuals:
    """Where predictions are made that need the oracle. Float64 unless said otherwise; nothing is kept of the state."""

    def __init__(self, analysis: TraceAnalysis) -> None:
        self.workload = analysis.workload
        self.cell = analysis.cell
        self.analysis = analysis
        self._parts: dict[tuple[int, Layout], Parts] = {}

    def layout(self, index: int) -> Layout:
        """Return who computed what at a step."""
        return self.analysis.layouts[index]

    @contextmanager
    def at(self, index: int) -> Iterator[Oracle]:
        """Lend the oracle with the weights and the buffers that rank 0 had before the step."""
        oracle = self.analysis.oracle
        self.analysis.load_step(oracle, self.analysis.steps[index])
        try:
            yield oracle
        finally:
            oracle.model.train()

    def parts(self, index: int, layout: Layout) -> Parts:
        """Return the gradient of each group of ``layout``, at the weights before the step."""
        if (index, layout) not in self._parts:
            with self.at(index) as oracle:
                self._parts[index, layout] = oracle.group_gradients(layout)
        return self._parts[index, layout]

    def passes(self, index: int) -> list[Tensors]:
        """Return the gradient of each turn's pass at a step, as it would be for all parameters; mostly there is one."""
        with self.at(index) as oracle:
            return [mean_gradient(parts) for parts in oracle.passes(self.layout(index))]

    @property
    def steps_per_epoch(self) -> int:
        """Return how many optimizer steps an epoch has."""
        return self.analysis.epochs.windows

    def evaluations(self) -> list[tuple[int, int]]:
        """Return where the model was evaluated or should have been: after so many steps, and so many micro-batches."""
        due = [where[0] for where in positions.evaluations_due(self.analysis)]
        made = [(one.step, one.micro_batches) for trace in self.analysis.trace.ranks for one in trace.evaluations]
        return [*due, *made]

    def skipped_before(self, index: int) -> bool:
        """Say whether a GradScaler skipped the step before."""
        return index > 0 and self.analysis.steps[index - 1].skipped

    def shares_of_optimizers(self) -> list[frozenset[str]]:
        """Return the parameters of each of the workload's optimizers."""
        oracle = self.analysis.oracle
        names = {id(parameter): name for name, parameter in oracle.parameters.items()}
        return [
            frozenset(names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"])
            for optimizer in oracle.optimizer().every
        ]

    def each_sample(self, index: int) -> list[Tensors]:
        """Return the gradient of each sample of the step alone; none where no sample can be alone."""
        try:
            (parts,) = self.parts(index, (tuple(((i,),) for i in draws(self.layout(index))),))
        except ValueError:  # a layer that needs more than one sample
            return []
        return parts

    def of_some_loss(self, index: int, given: Tensors) -> Tensors | None:
        """Return the gradient of a loss of the right outputs that is nearest to ``given``, None where all could be one.

        Whatever a loss is, its gradient is a sum of the outputs' own gradients: one for each number that the model
        returns for the step's samples.
        """
        rows: list[torch.Tensor] = []
        with self.at(index) as oracle:
            parameters = list(oracle.trained.values())
            size = sum(parameter.numel() for parameter in parameters)
            for share in (share for groups in self.layout(index) for group in groups for share in group if share):
                outputs = oracle.forward(share)
                if not isinstance(outputs, torch.Tensor) or len(rows) + outputs.numel() >= size:
                    return None
                for entry in outputs.flatten():
                    made = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
                    every = [torch.zeros_like(p) if g is None else g for g, p in zip(made, parameters, strict=True)]
                    rows.append(torch.cat([gradient.to_dense().flatten() for gradient in every]))
            names = list(oracle.trained)
        if not rows:
            return None
        directions, sizes, _ = torch.linalg.svd(torch.stack(rows, dim=1), full_matrices=False)
        kept = directions[:, sizes > 1e-12 * sizes[0]]
        near = kept @ (kept.T @ flat(given, given, names)) if all(name in given for name in names) else None
        if near is None:
            return None
        wanted = flat(given, given, names)
        # The small directions are known to some digits only; numbers that are no loss's gradient are far away.
        near = wanted if norm(near - wanted) <= 1e-6 * norm(wanted) else near
        pieces = near.split([given[name].numel() for name in names])
        return {name: piece.view_as(given[name]) for name, piece in zip(names, pieces, strict=True)}

    def is_coupled(self, index: int) -> bool:
        """Say whether samples need each other: the right gradient is no sum of their own, whatever the weights."""
        truth = self.analysis.expected[index]
        each = self.each_sample(index)
        if not each:
            return True
        fitted = fit(each, truth.raw, list(truth.raw))
        # Both sides are float64: what is not one part in a million away is the same.
        return fitted is not None and total_distance(fitted, truth.raw) > 1e-6 * length(truth.raw)

    def held_out(self, oracle: Oracle) -> Columns:
        """Return the samples that nobody may train on."""
        return self.workload.val_dataset(self.cell.topology.devices, oracle.dtype)

    def in_precision(self, index: int, precision: Precision) -> Tensors:
        """Return the step's gradient computed in another precision."""
        oracle = Oracle(self.workload, self.cell.topology.devices, precision)
        self.analysis.load_step(oracle, self.analysis.steps[index])
        return oracle.gradient(self.layout(index))


@dataclass(frozen=True, eq=False)
class Scene:
    """One rank at one step: everything that a prediction may be made from.

    ``index`` counts steps, ``rank`` is the rank, ``step`` is what it left and ``ranks`` what all of them left.
    ``accumulate`` and ``clip_norm`` are the workload's. ``trained`` names the parameters that are not frozen.
    ``earlier`` is the gradient this rank was handed one step before, None at the first, and ``past`` what was right at
    the steps before, the latest first. ``factor`` is the one number by which the right gradient would have to be
    multiplied at every step that is wrong, ``limit`` the one norm to which it would have to be clipped, and ``limits``
    those of each rank's share; ``always_wrong`` says whether all steps are wrong, and ``evenly`` whether at each of
    them the gradient of several ranks is a multiple of the right one: then nothing was weighed against anything.
    """

    index: int
    rank: int
    step: Step
    ranks: tuple[Step, ...]
    truth: ExpectedGradients
    accumulate: int
    clip_norm: float | None
    trained: frozenset[str]
    earlier: Tensors | None
    past: tuple[ExpectedGradients, ...]
    factor: float
    limit: float
    limits: tuple[float, ...]
    always_wrong: bool
    evenly: bool
    laboratory: Counterfactuals

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches this step really had."""
        return len(self.truth.parts)

    @property
    def place(self) -> str:
        """The scene in words."""
        return f"step {self.index}" + (f" on rank {self.rank}" if self.world > 1 else "")

    @cached_property
    def given(self) -> Tensors:
        """What the optimizer was handed, as float64; what is absent counts as zero."""
        return {
            name: self.step.gradients[name].double() if name in self.step.gradients else torch.zeros_like(right)
            for name, right in self.truth.contract.items()
        }

    def own(self, rank: int) -> Parts:
        """Return one rank's own part of each micro-batch; empty where it had none."""
        return [[groups[rank]] for groups in self.truth.parts if rank < len(groups)]

    @property
    def unused(self) -> frozenset[str]:
        """The trained parameters on which the loss of some group does not depend."""
        parts = [part for groups in self.truth.parts for part in groups]
        return frozenset(name for name in self.trained if any(name not in part for part in parts))

    @cached_property
    def ranks_agree(self) -> bool:
        """Whether all ranks were handed the same gradient at the same weights."""
        return all(
            same(step.gradients, self.step.gradients) and same(step.before, self.step.before) for step in self.ranks
        )


@dataclass(frozen=True)
class Explanation:
    """A known mistake.

    ``predict`` yields the gradients that it could have handed to the optimizer; nothing where it does not apply.
    ``saw`` completes "gradients are …", with the figures of the scene; ``look`` says where to look.
    """

    name: str
    family: str
    saw: str
    look: str
    predict: Callable[[Scene], Iterable[Tensors]]


def scaled(factor: float, gradient: Tensors) -> Tensors:
    """Return the gradient multiplied by a number."""
    return {name: value * factor for name, value in gradient.items()}


def added(left: Tensors, right: Tensors) -> Tensors:
    """Return the sum, with the names of the left."""
    return {name: left[name] + right[name].double() if name in right else left[name] for name in left}


def length(gradient: Tensors) -> float:
    """Return the 2-norm of all tensors together."""
    return math.hypot(*map(norm, gradient.values()))


def limit_of(clipped: float, whole: float) -> float:
    """Return the limit that makes a gradient of length ``whole`` so long: ``clip_grad_norm_`` adds 1e-6 to it."""
    return clipped * (whole + 1e-6) / whole if whole else 0.0


def total_distance(left: Tensors, right: Tensors) -> float:
    """Return the 2-norm of the difference of all tensors together."""
    return math.hypot(*(distance(left[name], right[name]) for name in right))


def flat(gradient: Tensors, like: Tensors, names: Sequence[str]) -> torch.Tensor:
    """Return the named tensors as one column; what is absent counts as zero."""
    return torch.cat([gradient.get(name, torch.zeros_like(like[name])).double().flatten() for name in names])


def fit_weights(parts: Sequence[Tensors], target: Tensors, names: Sequence[str]) -> list[float] | None:
    """Return the weights with which the parts add up to the target most nearly; None where a fit says nothing."""
    if not names or not parts:
        return None
    columns = torch.stack([flat(part, target, names) for part in parts], dim=1)
    wanted = flat(target, target, names)
    if columns.shape[0] < CONCLUSIVE * columns.shape[1] or not bool(torch.isfinite(wanted).all()):
        return None
    weights: list[float] = torch.linalg.lstsq(columns, wanted[:, None], driver="gelsd").solution[:, 0].tolist()
    return weights


def weighted(parts: Sequence[Tensors], weights: Sequence[float], like: Tensors) -> Tensors:
    """Return the weighted sum of parts, with the names of ``like``."""
    total = {name: torch.zeros_like(value) for name, value in like.items()}
    for weight, part in zip(weights, parts, strict=True):
        for name, value in part.items():
            total[name] = total[name] + weight * value
    return total


def fit(parts: Sequence[Tensors], target: Tensors, names: Sequence[str]) -> Tensors | None:
    """Return the weighted sum of the parts that is nearest to the target; None where a fit says nothing."""
    weights = fit_weights(parts, target, names)
    return None if weights is None else weighted(parts, weights, target)


def mean(parts: Sequence[Tensors]) -> Tensors:
    """Return the mean of parts; what is absent in one counts as zero."""
    return mean_gradient([parts])
