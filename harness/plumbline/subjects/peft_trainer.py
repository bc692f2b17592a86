"""Hugging Face PEFT: its LoRA layers around frozen layers, in the training loop of torch's tutorials.

The job's model already has adapters. PEFT creates LoRA layers around the same frozen layers. Their factors are then
replaced with those of the job's adapters, so that the trained parameters have the job's names and values.
"""

import copy

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by
from plumbline.subjects.torch_base import Ddp, OneDevice, fit
from plumbline.subjects.torch_fsdp import COMPUTES_ON_A_CPU, Fsdp
from plumbline.workloads.parameter_use import RANK, Adapted

with installed_by("pip install peft"):
    from peft import LoraConfig, get_peft_model

DECLARED = {"capabilities": ["frozen-parameters"], "library": "peft", "model": "adapters"}


@subject(name="peft", backends=["none", "ddp"], **DECLARED)
def train(job):
    job = WithPeft(job)
    fit(job, OneDevice(job) if job.backend == "none" else Ddp(job))


@subject(name="peft", backends=["fsdp"], precisions={"cuda": ["32"], "cpu": ["32"] * COMPUTES_ON_A_CPU}, **DECLARED)
def train_sharded(job):
    job = WithPeft(job)
    fit(job, Fsdp(job))


class WithPeft:
    """The job, with adapters by PEFT in its model."""

    def __init__(self, job):
        self.job = job

    def __getattr__(self, name):
        return getattr(self.job, name)

    def model(self):
        return adapted(self.job.model())


def adapted(model):
    """Return a model of the frozen layers of ``model``, to which PEFT has added LoRA layers."""
    own = {name: layer for name, layer in model.named_modules() if isinstance(layer, Adapted)}
    result = get_peft_model(frozen(model), LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(own)))
    for name, layer in own.items():
        lora = result.get_base_model().get_submodule(name)
        lora.lora_A["default"], lora.lora_B["default"] = layer.down, layer.up
    return result


def frozen(module):
    """Return the module with the frozen layer in place of each layer with an adapter."""
    if isinstance(module, Adapted):
        return module.base
    result = copy.copy(module)
    result._modules = {name: child and frozen(child) for name, child in module._modules.items()}
    return result
