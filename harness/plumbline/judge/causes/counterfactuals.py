"""Gradients that the oracle computes for several hypotheses: of other samples, layouts, data and losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import fit, flat, total_distance
from plumbline.judge.expected_metrics import evaluations_due
from plumbline.judge.oracle.layout import Layout, draws
from plumbline.judge.oracle.noise import length, norm
from plumbline.judge.oracle.oracle import Oracle, mean_gradient
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import Columns

Parts = list[list[Tensors]]
"""The gradient of each group alone, by micro-batch."""


class Counterfactuals:
    """Computes the gradients that other ways to compute a step would have given, in float64 by default.

    Each computation sets the oracle's weights and buffers, and restores its mode.
    """

    def __init__(self, analysis: TraceAnalysis) -> None:
        self.analysis = analysis
        self._parts: dict[tuple[int, Layout], Parts] = {}
        self.found_on_the_way: dict[bool, tuple[tuple[str, ...], float]] = {}
        """The layers and the factor that explained an earlier step's gradient; the key tells if it was lost there."""

    @contextmanager
    def at(self, index: int) -> Iterator[Oracle]:
        """Yield the oracle with the weights and the buffers that rank 0 had before the step."""
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
        """Return the gradient of each optimizer's backward at a step, for all parameters; usually there is one."""
        with self.at(index) as oracle:
            return [mean_gradient(parts) for parts in oracle.passes(self.analysis.layouts[index])]

    def evaluations(self) -> list[tuple[int, int]]:
        """Return where the model was or should have been evaluated: (steps, micro-batches) done before it."""
        due = [where[0] for where in evaluations_due(self.analysis)]
        made = [(one.step, one.micro_batches) for trace in self.analysis.trace.ranks for one in trace.evaluations]
        return [*due, *made]

    def parameters_of_optimizers(self) -> list[frozenset[str]]:
        oracle = self.analysis.oracle
        names = {id(parameter): name for name, parameter in oracle.stepped.items()}
        return [
            frozenset(names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"])
            for optimizer in oracle.optimizer().every
        ]

    def each_sample(self, index: int) -> list[Tensors]:
        """Return the gradient of each sample of the step alone; empty if the model needs several samples."""
        try:
            (parts,) = self.parts(index, (tuple(((i,),) for i in draws(self.analysis.layouts[index])),))
        except ValueError:  # a layer that needs more than one sample
            return []
        return parts

    def nearest_loss_gradient(self, index: int, observed: Tensors) -> Tensors | None:
        """Return the gradient nearest to ``observed`` that any loss of the right outputs could have.

        None if every gradient could be one. The gradient of any loss is a weighted sum of the gradients of the outputs:
        one for each number that the model returns for the step's samples.
        """
        rows: list[torch.Tensor] = []
        with self.at(index) as oracle:
            parameters = list(oracle.trained.values())
            size = sum(parameter.numel() for parameter in parameters)
            layout = self.analysis.layouts[index]
            for share in (share for groups in layout for group in groups for share in group if share):
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
        if not all(name in observed for name in names):
            return None
        wanted = flat(observed, observed, names)
        near = kept @ (kept.T @ wanted)
        # Directions with small singular values are imprecise. A gradient of no loss is much further away.
        near = wanted if norm(near - wanted) <= 1e-6 * norm(wanted) else near
        pieces = near.split([observed[name].numel() for name in names])
        return {name: piece.view_as(observed[name]) for name, piece in zip(names, pieces, strict=True)}

    def with_column(self, index: int, name: str, column: torch.Tensor) -> Tensors:
        """Return the step's gradient if a column of the data has these values."""
        with self.at(index) as oracle:
            data = oracle.data
            oracle.data = Columns({**data.columns, name: column})
            try:
                return mean_gradient(oracle.group_gradients(self.analysis.layouts[index]))
            finally:
                oracle.data = data

    def is_coupled(self, index: int) -> bool:
        """Return whether samples depend on each other: the right gradient is not a weighted sum of theirs."""
        right = self.analysis.expected[index].raw
        each = self.each_sample(index)
        if not each:
            return True
        fitted = fit(each, right, list(right))
        # Both sides are float64: smaller differences than one part in a million are rounding.
        return fitted is not None and total_distance(fitted, right) > 1e-6 * length(right)
