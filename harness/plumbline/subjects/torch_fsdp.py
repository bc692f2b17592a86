"""Training with torch's fully_shard (FSDP2): each rank holds shards of weights and gradients.

On a mesh of two dimensions this is HSDP: sharded within groups of ranks, replicated across groups.

https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html. Mixed precision uses autocast, because the
tutorial's MixedPrecisionPolicy casts weights but not buffers, and BatchNorm then fails on a CPU.
"""

from contextlib import nullcontext

import torch.distributed
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from plumbline.devices.calls import set_current
from plumbline.subjects.declare import subject
from plumbline.subjects.torch_base import CAPABILITIES, MASTER_WEIGHTS, PRECISIONS, OneDevice, fit

# Key the optimizers' state by parameter name, because ranks can hold different parameters.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
SOME = StateDictOptions(strict=False)


def save_parts(model, optimizers, folder, others, held=None):
    """Write this rank's parts of model and optimizers, and ``others``, which are the same on all ranks.

    ``held`` names the parameters and buffers that this rank trains. None: all parameters and buffers of the model.
    """
    dcp.save({**parts(model, optimizers, held), **others}, checkpoint_id=folder)


def load_parts(model, optimizers, folder, others, held=None):
    """Read this rank's parts of model and optimizers, and return the saved ``others``."""
    saved = {**parts(model, optimizers, held), **others}
    dcp.load(saved, checkpoint_id=folder)  # in place
    set_model_state_dict(model, saved["model"], options=SOME)
    if optimizers:
        set_optimizer_state_dict(model, optimizers, saved["optimizers"], options=BY_NAME)
    return {name: saved[name] for name in others}


def parts(model, optimizers, held):
    states = get_model_state_dict(model)
    if held is not None:
        states = {name: value for name, value in states.items() if name in held}
    return {
        "model": states,
        "optimizers": get_optimizer_state_dict(model, optimizers, options=BY_NAME) if optimizers else {},
    }


try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

COMPUTES_ON_A_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)

OF_FSDP = [*PRECISIONS, MASTER_WEIGHTS]

# fully_shard reduces neither sparse gradients nor gradients of parameters that only some ranks have used.
REFUSED = {"sparse-gradients", "unused-parameters"}


@subject(
    name="torch",
    backends=["fsdp", "hsdp"],
    precisions={"*": OF_FSDP, "cpu": OF_FSDP if COMPUTES_ON_A_CPU else []},
    capabilities=CAPABILITIES - REFUSED,
    gradients="float32",
    library="torch",
)
def train(job):
    fit(job, Fsdp(job))


class Fsdp(OneDevice):
    """fully_shard, which gathers a layer's weights for its forward and backward, and averages gradients into shards."""

    def __init__(self, job):
        # On a two-dimensional mesh, weights are replicated along the first dimension and sharded along the second.
        self.model = self.bare = shard(job.model().to(job.device), joined_mesh(job), **policy(job))
        self.model.register_forward_pre_hook(broadcast_buffers, prepend=True)
        self.optimizers = job.optimizers(self.model.parameters())  # over the shards

    def backward_of(self, last):
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def val_share(self, job):
        return range(len(job.val_dataset))  # a forward gathers weights, so all ranks need the same number

    def save(self, file, others):
        # The next forward would begin with rank 0's buffers, so save these.
        broadcast_buffers(self.model, ())
        save_parts(self.model, self.optimizers, file, others)

    def load(self, file, others):
        return load_parts(self.model, self.optimizers, file, others)


def joined_mesh(job):
    set_current(job.device)  # because a mesh specifies only a device type
    torch.distributed.init_process_group(job.comm)
    return init_device_mesh(job.device.type, tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))


def policy(job):
    """Return the fully_shard option for master weights: gather float32 weights as bfloat16, reduce in float32."""
    if job.precision != MASTER_WEIGHTS:
        return {}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def shard(model, mesh, **options):
    """Return the model with its weights sharded over the mesh. Each of its ``units`` is gathered separately."""
    for parameter in model.parameters() if options else ():
        parameter.data = parameter.data.float()  # the master weights; buffers have the dtype of the activations
    for layer in units(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def units(model):
    """Return the layers of Sequentials, innermost first. The model only calls these, but can use others' weights."""
    lists = [module for module in reversed(list(model.modules())) if isinstance(module, nn.Sequential)]
    return [layer for layers in lists for layer in layers if list(layer.parameters())]


def broadcast_buffers(model, args):
    """Begin a forward with the buffers of rank 0, as DistributedDataParallel does and fully_shard does not."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)
