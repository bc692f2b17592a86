"""Records what is known of each parameter of an optimizer, apart from its gradient."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import Optimizer

from plumbline.check.evidence.training import Parameter, as_real
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.evidence.trace import dtype_name
from plumbline.recording.flat_sharding import part_of
from plumbline.recording.parameter_names import ParameterNames
from plumbline.recording.parameters import parameters_of
from plumbline.recording.sharding import reduction_dtypes


def recorded_parameters(
    optimizer: Optimizer, names: ParameterNames, sample: ParameterSample, *, accumulated: bool
) -> tuple[Parameter, ...]:
    reduced = reduction_dtypes(names.roots, accumulated=accumulated)

    def recorded(name: str, parameter: Tensor) -> Parameter:
        values, part = as_real(parameter), part_of(parameter)
        return Parameter(
            name,
            tuple(values.shape if part is None else part.shape),
            dtype_name(values.dtype),
            dtype_name(reduced.get(id(parameter))),
            sample.has(parameter),
            names.knows(parameter),
            parameter.requires_grad,
        )

    return tuple(map(recorded, names.of(optimizer), parameters_of(optimizer)))
