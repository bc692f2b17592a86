"""AIToolbox's TrainLoop, which starts its own processes for ddp and gives each its samples.

Spawned processes get the model in shared memory. Moving it to a GPU copies it, but on a CPU all ranks would update the
same weights. There, the callback ``_OwnMemory`` copies it.

AIToolbox imports packages for plots, uploads and reports that training does not use. Empty modules replace packages
that are not installed.
"""

import os

from torch import nn
from torch.utils.data import DataLoader

from plumbline.subjects.declare import CAPABILITIES, subject
from plumbline.subjects.released import installed_by, stand_ins

UNUSED = {
    **{name: name for name in ("boto3", "botocore", "matplotlib", "seaborn", "sklearn", "wandb")},
    "google": "google.cloud.storage",
    "torch.utils.tensorboard": "tensorboard",
}
"""Imported modules that training does not use, each with the module whose presence shows whether it is installed."""

with installed_by("pip install tqdm && pip install aitoolbox --no-deps"), stand_ins(UNUSED):
    from aitoolbox.torchtrain.callbacks.abstract import AbstractCallback
    from aitoolbox.torchtrain.callbacks.gradient import GradNormClip
    from aitoolbox.torchtrain.model import TTModel
    from aitoolbox.torchtrain.schedulers.basic import GeneralLRSchedulerCallback
    from aitoolbox.torchtrain.train_loop.train_loop import TrainLoop

GPU_MODES = {"none": "single", "dp": "dp", "ddp": "ddp"}


class Adapter(TTModel):
    """The job's model as a TTModel."""

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
    """A subclass of TrainLoop, so that spawned processes import this file, which provides the empty modules."""


class Schedule(GeneralLRSchedulerCallback):
    """The job's schedule, which steps after each optimizer step."""

    def on_epoch_end(self):
        pass

    def on_batch_end(self):
        if self.scheduler is not None and self.train_loop_obj.should_execute_optimizer_update():
            self.scheduler.step()


class _OwnMemory(AbstractCallback):
    """Copies the model's weights and buffers to memory of this process."""

    def __init__(self):
        super().__init__("Copy of the model per rank")

    def on_multiprocess_start(self):
        model = self.train_loop_obj.model
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def _declared(backends, precisions):
    return subject(
        name="aitoolbox",
        backends=backends,
        precisions=precisions,
        capabilities=CAPABILITIES - {"several-optimizers", "validation", "checkpoint", "metrics"},
        library="aitoolbox",
        launch="node",
    )


# It uses torch.cuda.amp for float16, and torch.nn.DataParallel splits batches only over CUDA devices.
@_declared(["none", "ddp"], {"cpu": ["64", "32"], "cuda": ["64", "32", "16"]})
def train(job):
    fit(job)


@_declared(["dp"], {"cuda": ["64", "32", "16"]})
def train_on_replicas(job):
    fit(job)


def fit(job):
    on_gpu = job.accelerator == "cuda"
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise it would use a GPU
    model = Adapter(job.model())
    loop = Loop(
        model,
        DataLoader(job.dataset, batch_size=job.batch_size, shuffle=job.shuffle),
        None,
        None,
        job.optimizer(model.parameters()),
        Criterion(job),
        end_auto_eval=False,
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
