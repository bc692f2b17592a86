"""The right base trainers of the mistakes in other files, on the same cells, and variants of them."""

from __future__ import annotations

import torch
import torch.distributed
import torch.distributed.nn
from base_trainer import BaseTrainer, DeviceReplicas, ManualAverage
from expect import known_good
from torch.nn.parallel import DistributedDataParallel

INDEPENDENT = ("linear-exact", "mlp")
COUPLED = ("cnn-batchnorm", "contrastive", "lm-tokens")
"""Workloads whose loss or statistics depend on which samples are together on a rank."""


@known_good(
    on=[
        "accumulation/none/1x1/32", "accumulation/ddp/1x3/32", "accumulation-tokens/none/1x1/32",
        "clipping/none/1x1/32", "clipping/ddp/1x3/16", "clipping/ddp/1x3/32",
        "clipping-adamw/ddp/1x3/32", "clipping-adamw/ddp/1x3/64",
        "schedule/none/1x1/32", "schedule-windows/ddp/1x3/32",
        "adam/none/1x1/32", "adam/ddp/1x3/32", "adamw/none/1x1/32", "adamw/ddp/1x3/64",
        "validation/none/1x1/32", "metrics/ddp/1x3/32", "sequential/none/1x1/32", "sequential/ddp/1x3/32",
        "uneven/none/1x1/32", "uneven/ddp/1x3/32", "dropout/none/1x1/32", "dropout/ddp/1x3/32",
        "random-masks/none/1x1/32", "random-masks/ddp/1x3/32",
        "several-optimizers/none/1x1/32", "several-optimizers/ddp/1x3/32",
        "thawed/ddp/1x3/32", "frozen/none/1x1/32", "frozen/ddp/1x3/32",
        "transformer/none/1x1/32", "transformer/ddp/1x3/32",
        "embedding-sparse/ddp/1x3/32", "embedding-sparse/ddp/1x3/16",
        "unused-parameters/ddp/1x3/32", "unused-at-the-end/ddp/1x3/32",
        "overflow/ddp/1x3/16", "overflow-schedule/ddp/1x3/16",
    ]
)  # fmt: skip
class RightInEveryPart(BaseTrainer):
    """The unmodified base trainer."""


@known_good(on=["validation/ddp/1x3/32"], deviates=True)
class RightWhereRanksHaveStatisticsOfTheirOwn(BaseTrainer):
    """The unmodified base trainer, with BatchNorm statistics per rank."""


@known_good(on=[f"{workload}/ddp/1x3/32" for workload in INDEPENDENT])
class AveragedByHand(ManualAverage):
    """Averages gradients and broadcasts buffers without DistributedDataParallel."""


@known_good(on=[f"{workload}/ddp/1x3/32" for workload in COUPLED], deviates=True)
class AveragedByHandCoupled(ManualAverage):
    """``AveragedByHand`` on coupled samples."""


class OddBuckets(BaseTrainer):
    """Uses tiny buckets, gradients that are views of them, and a static graph."""

    def wrap(self, model):
        torch.distributed.init_process_group(self.job.comm)
        return DistributedDataParallel(model, bucket_cap_mb=0.0001, gradient_as_bucket_view=True, static_graph=True)


@known_good(on=[f"{workload}/ddp/1x3/32" for workload in INDEPENDENT])
class OddBucketsIndependent(OddBuckets):
    """``OddBuckets`` on independent samples."""


@known_good(on=[f"{workload}/ddp/1x3/32" for workload in COUPLED], deviates=True)
class OddBucketsCoupled(OddBuckets):
    """``OddBuckets`` on coupled samples."""


@known_good(
    on=[
        "nested-outputs/dp/1x3/32", "nested-outputs/dp/1x3/16",
        *(f"{workload}/{place}/64" for workload in INDEPENDENT for place in ("dp/1x2", "dp/1x3", "ddp2/2x2")),
        *(f"{workload}/{place}/64" for workload in COUPLED[1:] for place in ("dp/1x2", "dp/1x3")),
    ]
)  # fmt: skip
class ReplicasByHand(DeviceReplicas):
    """Gathers outputs before the loss, so a process computes what one device does, except for BatchNorm."""


@known_good(
    on=[
        *(f"cnn-batchnorm/{place}/64" for place in ("dp/1x2", "dp/1x3", "ddp2/2x2")),
        *(f"{workload}/ddp2/2x2/64" for workload in COUPLED[1:]),
    ],
    deviates=True,
)
class ReplicasByHandCoupled(DeviceReplicas):
    """``ReplicasByHand`` where each node computes its own loss, or each device its own statistics."""


@known_good(on=["mlp/dp/1x2/32"])
class LossOfEachDevice(DeviceReplicas):
    """Averages the losses of equal parts, which is the loss of the batch if samples are independent."""

    def gather(self, outputs):
        return outputs

    def loss(self, outputs, batch):
        parts = zip(*(column.chunk(len(outputs)) for column in batch.values()), strict=True)
        parts = [dict(zip(batch, columns, strict=True)) for columns in parts]
        return sum(map(self.job.loss, outputs, parts)) / len(outputs)


@known_good(on=["contrastive/ddp/1x2/32"])
class NegativesThroughTheJob(BaseTrainer):
    """Gives the job's own loss the outputs and samples of all ranks."""

    def loss(self, outputs, batch):
        gather = torch.distributed.nn.functional.all_gather
        everything = {name: torch.cat(gather(column)) for name, column in batch.items()}
        return self.job.loss(torch.cat(gather(outputs)), everything)
