"""AIToolbox's TrainLoop under test: it starts its own processes for ddp, and gives each of them its samples.

On a cpu it is told so as its documentation says (``on_gpu=False``), and one thing is added that a GPU brings by itself:
memory of each rank's own. The processes that are spawned get the model in memory that they share, and moving it to a
GPU would copy it; on a cpu all ranks would step the same weights, once each. ``_OwnMemory`` is a callback.

Its import asks for packages that draw, upload and report, of which training uses none. Where one is not installed, an
empty module takes its place while it is imported.
"""

from __future__ import annotations

import os

from torch import nn
from torch.utils.data import DataLoader

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by
from plumbline.subjects.stand_ins import stand_ins

UNUSED = {
    **{name: name for name in ("boto3", "botocore", "matplotlib", "seaborn", "sklearn", "wandb")},
    "google": "google.cloud.storage",
    "torch.utils.tensorboard": "tensorboard",
}
"""Modules that it imports and that training does not use, each with one by which it is known to be there."""

with installed_by("pip install tqdm && pip install aitoolbox --no-deps"), stand_ins(UNUSED):
    from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback
    from aitoolbox.torchtrain.callbacks.gradient import GradNormClip
    from aitoolbox.torchtrain.model import TTModel
    from aitoolbox.torchtrain.schedulers.basic import GeneralLRSchedulerCallback
    from aitoolbox.torchtrain.train_loop.train_loop import TrainLoop

CAPABILITIES = [
    "accumulation", "clipping", "scheduler",
    "unused-parameters", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip

GPU_MODES = {"none": "single", "dp": "dp", "ddp": "ddp"}


class Adapter(TTModel):
    """The job's model as one that takes its own loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(batch)

    def get_loss(self, batch_data, criterion, device):
        batch = {name: column.to(device) for name, column in batch_data.items()}
        return criterion(self(batch), batch)

    def get_predictions(self, batch_data, device):
        raise NotImplementedError("no job asks for predictions")


class Criterion(nn.Module):
    """The job's loss as a module, because criteria are moved to a device."""

    def __init__(self, job):
        super().__init__()
        self.job = job

    def forward(self, outputs, batch):
        return self.job.loss(outputs, batch)


class Loop(TrainLoop):
    """The TrainLoop itself, by a name that leads a spawned process through this file, and so to the empty modules."""


class Schedule(GeneralLRSchedulerCallback):
    """The job's schedule, a step of it for each step of the optimizer, as AIToolbox's own do with ``on_batch_end``."""

    def on_epoch_end(self):
        pass

    def on_batch_end(self):
        if self.scheduler is not None and self.train_loop_obj.should_execute_optimizer_update():
            self.scheduler.step()


class _OwnMemory(AbstractCallback):
    """What a GPU has: the model's weights and buffers in memory of this process's own."""

    def __init__(self):
        super().__init__("Memory of each rank's own")

    def on_multiprocess_start(self):
        model = self.train_loop_obj.model
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def _declared(backends, precisions):
    return subject(
        name="aitoolbox",
        backends=backends,
        precisions=precisions,
        capabilities=CAPABILITIES,
        library="aitoolbox",
        launch="node",
    )


# Its 16 bits are those of torch.cuda.amp, and torch.nn.DataParallel splits a batch over CUDA devices alone.
@_declared(["none", "ddp"], {"cpu": ["64", "32"], "cuda": ["64", "32", "16"]})
def train(job):
    fit(job)


@_declared(["dp"], {"cuda": ["64", "32", "16"]})
def train_on_replicas(job):
    fit(job)


def fit(job):
    on_gpu = job.accelerator == "cuda"
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it takes a GPU where there is one
    model = Adapter(job.model())
    loop = Loop(
        model,
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        None,
        None,
        job.optimizer(model.parameters()),
        Criterion(job),
        end_auto_eval=False,  # evaluations that the job did not ask for
        gpu_mode=GPU_MODES[job.backend],
        use_amp=job.precision == "16",
    )
    callbacks = [Schedule(job.scheduler)]
    if job.clip_norm is not None:
        callbacks.append(GradNormClip(job.clip_norm))
    if job.backend == "ddp" and not on_gpu:
        callbacks.append(_OwnMemory())
    loop.fit(job.epochs, callbacks=callbacks, grad_accumulation=job.accumulate, **_mode(job, on_gpu))


def _mode(job, on_gpu):
    if job.backend == "dp":
        return {"dp_model_args": {"device_ids": list(range(job.gpus))}}
    if job.backend == "none":
        return {}
    return {
        "num_nodes": job.num_nodes,
        "node_rank": job.node_rank,
        "num_gpus": job.gpus,
        "backend": job.comm,
        "init_method": f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "on_gpu": on_gpu,
        "ddp_model_args": {"find_unused_parameters": job.unused_parameters},
    }
