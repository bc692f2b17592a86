"""Runs torchtitan's own training, ``torchtitan.train``, on the CPU with gloo, although it requires an accelerator."""

from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.attention import flex_attention

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device=None: {}

import torchtitan.distributed.utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.train import main  # noqa: E402

_set_factor = FSDPModule.set_gradient_divide_factor


def _set_factor_on_gloo(self, factor):
    _set_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # gloo does not support premultiplied sums


FSDPModule.set_gradient_divide_factor = _set_factor_on_gloo
torchtitan.distributed.utils.set_pg_timeouts = lambda *arguments, **options: None  # its barrier passes a device
flex_attention._validate_device = lambda *tensors: None  # torch has no backward for it on the CPU
FlexAttention._compiled_flex_attn = flex_attention.flex_attention


def _accept_micro_batches(schedule):
    """Let ``step`` accept micro-batches, which torchtitan 0.3.0 passes; torch 2.13 only splits a batch itself."""
    step = schedule.step

    def step_micro_batches(self, *args, kwarg_mbs=None, arg_mbs=None, target_mbs=None, **options):
        if kwarg_mbs is None:
            return step(self, *args, **options)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        return self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **options)

    schedule.step = step_micro_batches


for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
    _accept_micro_batches(schedule)

if __name__ == "__main__":
    main()
