"""Gradients that the oracle computes for hypotheses: of other samples, other layouts, other modes and precisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.core.precision import Precision
from plumbline.evidence.trace import Tensors
from plumbline.judge.causes.combinations import fit, flat, total_distance
from plumbline.judge.oracle.layout import Layout, draws
from plumbline.judge.oracle.noise import length, norm
from plumbline.judge.oracle.oracle import Oracle, mean_gradient
from plumbline.judge.positions import evaluations_due
from plumbline.judge.trace_analysis import TraceAnalysis
from plumbline.workloads import Columns

Parts = list[list[Tensors]]
"""The gradient of each group alone, by micro-batch."""


class Counterfactuals:
    """Computes the gradients that other ways to compute a step would have given, in float64 by default.

    Each computation sets the oracle's weights and buffers, and restores its mode.
    """

    def __init__(self, analysis: TraceAnalysis) -> None:
        self.workload = analysis.workload
        self.cell = analysis.cell
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

    def use_gradients(self, index: int, name: str) -> list[torch.Tensor]:
        """Return a parameter's gradient through each single layer that uses it, in the model's order of layers."""
        with self.at(index) as oracle:
            return [
                mean_gradient(oracle.group_gradients(self.analysis.layouts[index]))[name]
                for _ in oracle.used_by_one_layer(name)
            ]

    def passes(self, index: int) -> list[Tensors]:
        """Return the gradient of each optimizer's backward at a step, for all parameters; usually there is one."""
        with self.at(index) as oracle:
            return [mean_gradient(parts) for parts in oracle.passes(self.analysis.layouts[index])]

    @property
    def steps_per_epoch(self) -> int:
        return self.analysis.epochs.windows

    def evaluations(self) -> list[tuple[int, int]]:
        """Return where the model was or should have been evaluated: (steps, micro-batches) done before it."""
        due = [where[0] for where in evaluations_due(self.analysis)]
        made = [(one.step, one.micro_batches) for trace in self.analysis.trace.ranks for one in trace.evaluations]
        return [*due, *made]

    def skipped_before(self, index: int) -> bool:
        return index > 0 and self.analysis.steps[index - 1].skipped

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
            for share in (
                share for groups in self.analysis.layouts[index] for group in groups for share in group if share
            ):
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

    def with_weights_scaled(self, index: int, names: Collection[str], factor: float) -> Tensors:
        """Return the step's gradient at weights of which the named ones are multiplied by ``factor``."""
        with self.at(index) as oracle:
            before = self.analysis.steps[index].ranks[0].before
            oracle.load({name: value * factor if name in names else value for name, value in before.items()})
            return mean_gradient(oracle.group_gradients(self.analysis.layouts[index]))

    def with_gradient_scaled(self, index: int, layers: Collection[str], factor: float) -> Tensors:
        """Return the step's gradient if the backward multiplies the gradient at some layers' outputs by ``factor``."""

        def scale(layer: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
            return output.detach() + factor * (output - output.detach())

        with self.at(index) as oracle:
            handles = [oracle.model.get_submodule(name).register_forward_hook(scale) for name in layers]
            try:
                return mean_gradient(oracle.group_gradients(self.analysis.layouts[index]))
            finally:
                for handle in handles:
                    handle.remove()

    def with_positions(self, index: int, renumber: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Tensors]:
        """Yield the step's gradient if position embeddings number the positions 0, 1, ... in another way.

        Yields nothing if the model has no such embedding.
        """
        with self.at(index) as oracle, _renumbered(oracle.model, renumber) as done:
            gradient = mean_gradient(oracle.group_gradients(self.analysis.layouts[index]))
        if done:
            yield gradient

    def is_coupled(self, index: int) -> bool:
        """Return whether samples depend on each other: the right gradient is not a weighted sum of theirs."""
        right = self.analysis.expected[index].raw
        each = self.each_sample(index)
        if not each:
            return True
        fitted = fit(each, right, list(right))
        # Both sides are float64: smaller differences than one part in a million are rounding.
        return fitted is not None and total_distance(fitted, right) > 1e-6 * length(right)

    def in_precision(self, index: int, precision: Precision) -> Tensors:
        return self._gradient(index, Oracle(self.workload, self.cell.topology.devices, precision))

    def with_products_in_tf32(self, index: int) -> Iterator[Tensors]:
        """Yield the step's gradient if a CUDA device computes products in TF32, for each way to round to it."""
        for rounded in (truncated, nearest):
            with self.at(index) as oracle, ProductsInTf32(rounded):
                yield oracle.gradient(self.analysis.layouts[index])

    def with_loss_in(self, index: int, dtype: torch.dtype) -> Iterator[Tensors]:
        """Yield the step's gradient if the model's outputs are cast to ``dtype`` before the loss is computed.

        With several micro-batches, each loss is divided by their number either in that precision or later.
        """
        oracle = Oracle(self.workload, self.cell.topology.devices, self.cell.arithmetic, dtype)
        for divisor in sorted({1, len(self.analysis.layouts[index])}):
            yield self._gradient(index, oracle, 1 / divisor)

    def _gradient(self, index: int, oracle: Oracle, scale: float = 1.0) -> Tensors:
        self.analysis.load_step(oracle, self.analysis.steps[index])
        return oracle.gradient(self.analysis.layouts[index], scale)


@contextmanager
def _renumbered(model: nn.Module, otherwise: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[list[nn.Module]]:
    """Give other numbers to the embeddings that get the positions 0, 1, ...; yield the embeddings found."""
    found: list[nn.Module] = []

    def renumber(layer: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        (positions,) = args
        every = torch.arange(positions.shape[-1] if positions.dim() else 0)
        if not len(every) or not bool((positions == every).all()):
            return None
        found.append(layer)
        return (otherwise(every).expand_as(positions),)

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    handles = [layer.register_forward_pre_hook(renumber) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


_CUT = 23 - 10
"""The number of mantissa bits that float32 has in addition to TF32's."""


def truncated(values: Tensor) -> Tensor:
    """Return ``values`` as the tensor cores read them: the bits beyond TF32's are cut off."""
    return _without_last_bits(values.float().view(torch.int32), values)


def nearest(values: Tensor) -> Tensor:
    """Return ``values`` rounded to the nearest TF32 number."""
    return _without_last_bits(values.float().view(torch.int32) + (1 << (_CUT - 1)), values)


def _without_last_bits(bits: Tensor, values: Tensor) -> Tensor:
    return (bits >> _CUT << _CUT).view(torch.float32).to(values.dtype)


class ProductsInTf32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the factors of matrix products and convolutions, forward and backward; sums are not rounded.

    CUDA devices can use TF32 for float32 tensors:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounded = rounded

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        factors = _FACTORS.get(func, ())
        given = [self._rounded(one) if index in factors else one for index, one in enumerate(args)]
        results = func(*given, **(kwargs or {}))
        if func is torch.ops.aten.convolution_backward.default:
            *others, bias = results
            return *others, bias if bias is None else func(*args, **(kwargs or {}))[-1]  # a sum, no product
        return results


_FACTORS = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.baddbmm.default: (1, 2),
    torch.ops.aten.convolution.default: (0, 1),
    torch.ops.aten.convolution_backward.default: (0, 1, 2),
}
