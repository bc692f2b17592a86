"""MosaicML Composer: its Trainer divides a batch into microbatches, clips with an algorithm, and writes checkpoints.

A Composer batch is a whole window of gradient accumulation.
"""

import os

from torch.utils.data import DataLoader

from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by

with installed_by("pip install mosaicml"):
    from composer import Trainer
    from composer.algorithms import GradientClipping
    from composer.models import ComposerModel
    from composer.utils import dist

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "checkpoint", "frozen-parameters", "sparse-gradients", "nested-outputs",
]  # fmt: skip

PRECISIONS = {"64": "fp32", "32": "fp32", "16": "amp_fp16", "bf16": "amp_bf16"}  # fp32: the weights' dtype


class Adapter(ComposerModel):
    """The job's model and loss as a ComposerModel."""

    def __init__(self, job):
        super().__init__()
        self.job, self.model = job, job.model()

    def forward(self, batch):
        return self.model(batch)

    def loss(self, outputs, batch, *args, **kwargs):
        return self.job.loss(outputs, batch)


@subject(
    name="composer",
    backends=["none", "ddp"],
    precisions={"cuda": list(PRECISIONS), "cpu": ["64", "32"]},  # it refuses others on a CPU
    capabilities=CAPABILITIES,
    library="mosaicml",
)
def train(job):
    os.environ.setdefault("NODE_RANK", str(job.node_rank))
    device = "gpu" if job.accelerator == "cuda" else "cpu"
    dist.initialize_dist(device)
    model = Adapter(job)
    optimizer = job.optimizer(model.model.parameters())
    sampler = dist.get_sampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    clipping = [GradientClipping("norm", job.clip_norm)] if job.clip_norm is not None else []
    Trainer(
        model=model,
        train_dataloader=DataLoader(job.dataset, job.batch_size * job.accumulate, sampler=sampler),
        max_duration=f"{job.stop_after_step}ba" if job.stop_after_step else f"{job.epochs}ep",
        optimizers=optimizer,
        schedulers=job.scheduler(optimizer),
        step_schedulers_every_batch=True,
        algorithms=clipping,
        device=device,
        precision=PRECISIONS[job.precision],
        device_train_microbatch_size=job.batch_size,
        seed=job.seed,
        save_folder=job.checkpoint_dir if job.stop_after_step else None,
        save_interval=f"{job.stop_after_step}ba" if job.stop_after_step else "1ep",
        load_path=f"{job.checkpoint_dir}/latest-rank0.pt" if job.resume else None,
        progress_bar=False,
    ).fit()
