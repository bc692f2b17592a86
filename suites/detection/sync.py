"""Missing synchronisation: gradients or weights differ between ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer, ManualAverage
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader, mesh_of, sharded, train, zero
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

ANYWHERE = [
    "mlp/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64", "contrastive/ddp/1x4/32", "lm-tokens/ddp/2x2/bf16",
    "mlp/ddp/1x3/bf16-true",
]  # fmt: skip


@known_bad(
    "sync",
    causes=["not-synchronised"],
    on={
        **any_check(*ANYWHERE),
        **failing("ranks-agree", "mlp/ddp/1x2"),
        **failing("gradients", "mlp/ddp/1x2", precisions=["16", "bf16"]),
        **failing("gradients", "cnn-batchnorm/ddp/1x2"),
    },
)
def forward_through_the_inner_module(job):
    """Calls the inner module, so DDP never reduces gradients."""
    model = ddp(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model.module(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad(
    "sync",
    causes=["not-synchronised"],
    on={**any_check(*ANYWHERE, "mlp/ddp/1x4/bf16"), **failing("gradients", "mlp/ddp/1x3")},
)
def all_inside_no_sync(job):
    """The whole loop runs inside ``no_sync``."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    with model.no_sync():
        for epoch in range(job.epochs):
            for batch in loader(job, epoch):
                job.loss(model(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad()


@known_bad("sync", causes=["not-broadcast"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64", "lm-tokens/ddp/2x2/32"])
def only_matrices_are_broadcast(job):
    """Broadcasts only matrices, so vectors keep each rank's own initial values."""
    model = alone(job)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
        dist.broadcast(parameter.data, 0)
        if parameter.dim() == 1 and job.rank > 0:
            torch.nn.init.normal_(parameter)
    train(job, model, after_backward=average)


@known_bad(
    "sync",
    causes=["not-broadcast"],
    on={
        **any_check("mlp/ddp/1x2/32", "mlp/ddp/1x3/64"),
        **failing("initial-weights", "mlp/ddp/1x2"),
        **failing("ranks-agree", "lm-tokens/ddp/1x3"),
    },
)
def biases_not_broadcast(job):
    """Initialises biases differently on each rank, and does not broadcast them."""
    model = alone(job)
    for name, parameter in model.named_parameters():
        if job.rank > 0 and name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    train(job, model, after_backward=average)


@known_bad("sync", causes=["not-broadcast"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x4/64", "cnn-batchnorm/ddp/1x3/32"])
def every_rank_its_own_weights(job):
    """Each rank initialises its own weights; only gradients are averaged."""
    model = alone(job)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    train(job, model, after_backward=average)


@known_bad(
    "sync",
    causes=["another-ranks-gradient"],
    on={
        **any_check("mlp/ddp/1x2/32", "mlp/ddp/1x4/64", "linear-exact/ddp/1x2/32"),
        **failing("gradients", "mlp/ddp/1x2"),
    },
)
def rank_zero_broadcasts_its_own_gradient(job):
    """Broadcasts rank 0's gradients: the ranks agree, but the other ranks' samples do not count."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                dist.broadcast(parameter.grad, 0)
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "sync",
    causes=["some-parameters-not-synchronised"],
    on={
        **any_check("mlp/ddp/1x3/32", "cnn-batchnorm/ddp/1x2/64"),
        **failing("ranks-agree", "mlp/ddp/1x2"),
        **failing("gradients", "mlp/ddp/2x2"),
    },
)
def one_parameter_forgotten(job):
    """The last bias is not averaged."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in list(model.parameters())[:-1]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_bad("sync", causes=["averaged-over-some-ranks"], on=["mlp/ddp/2x2/32", "cnn-batchnorm/ddp/2x2/64"])
def averaged_inside_a_node_only(job):
    """Each node averages over its own gpus; nothing is exchanged between nodes."""
    model = alone(job)
    nodes = [dist.new_group(range(first, first + job.gpus)) for first in range(0, job.world_size, job.gpus)]
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=nodes[job.node_rank])
                parameter.grad /= job.gpus
            optimizer.step()
            optimizer.zero_grad()


@known_bad("sync", causes=["not-synchronised"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def weights_averaged_now_and_then(job):
    """Local SGD: ranks step alone, and average their weights at the end of each epoch."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= job.world_size


@known_bad("sync", causes=["not-synchronised"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x4/64"])
def averaged_every_other_step(job):
    """Averages gradients only at every second step."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    steps = 0
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            if steps % 2 == 0:
                average(job, model)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1


@known_bad(
    "sync",
    causes=["one-step-late"],
    on={**any_check("mlp/ddp/1x3/32", "cnn-batchnorm/ddp/1x2/32"), **failing("gradients", "mlp/ddp/1x2")},
)
def averaged_one_step_late(job):
    """Does not wait for the all-reduce: each step uses the average of the step before."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    late = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            average(job, model)
            for index, parameter in enumerate(model.parameters()):
                late[index], parameter.grad = parameter.grad, late[index]
            optimizer.step()
            optimizer.zero_grad()


@known_bad("sync", causes=["not-synchronised"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def averaged_after_the_step(job):
    """Averages gradients after the step."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            average(job, model)
            optimizer.zero_grad()


@known_bad("sync", causes=["averaged-over-some-ranks"], on=["mlp/ddp/1x3/32", "mlp/ddp/1x4/64"])
def last_rank_left_out(job):
    """Leaves the last rank out of the all-reduce's group, so it trains alone."""
    model = alone(job)
    group = dist.new_group(range(job.world_size - 1))
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            if job.rank < job.world_size - 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= job.world_size - 1
            optimizer.step()
            optimizer.zero_grad()


@known_bad("sync", causes=["averaged-over-some-ranks"], on=["mlp/fsdp/2x2/32", "lm-tokens/fsdp/2x2/64"])
def sharded_on_each_node_alone(job):
    """Shards over the ranks of each node only, so nodes exchange nothing."""
    model = fully_shard(job.model(), mesh=mesh_of(job)["gpu"])
    train(job, model)


@known_bad("sync", "optimizer", causes=["parameter-not-in-optimizer"], on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64"])
def shards_never_synchronised(job):
    """Turns gradient synchronisation off for good, so shards never get gradients."""
    model = sharded(job)
    model.set_requires_gradient_sync(False)
    train(job, model)


@known_bad("sync", causes=["not-synchronised"], on=["mlp/zero/1x2/32", "mlp/zero/1x3/64", "linear-exact/zero/1x4/32"])
def gradients_of_one_rank_for_each_share(job):
    """Each rank steps its share of the weights with its own gradients, and broadcasts the result."""
    model = alone(job)
    optimizer = zero(job, model)
    train(job, model, optimizer)


class _Silent(ZeroRedundancyOptimizer):
    def _sync_params(self):
        """Broadcast nothing."""


@known_bad("sync", causes=["stepped-in-part"], on=["mlp/zero/1x2/32", "mlp/zero/1x3/64", "contrastive/zero/2x2/32"])
def shares_of_the_update_never_broadcast(job):
    """Each rank steps its share of the weights, but does not broadcast the result."""
    model = ddp(job)
    optimizer = zero(job, model, _Silent)
    train(job, model, optimizer)


@known_bad("sync", causes=["some-parameters-not-synchronised"], on={"embedding-sparse/ddp/1x3/16": "gradients"})
class SparseGradientsLeftOut(ManualAverage):
    """Only dense gradients are averaged."""

    def synchronize(self):
        own = self.model.embedding.weight.grad.clone()
        super().synchronize()
        self.model.embedding.weight.grad = own


@known_bad("sync", causes=["initialised-anew"], on=failing("initial-weights", "mlp/ddp/1x2"))
class WeightsDrawnAnew(BaseTrainer):
    """Initialises the model again; DistributedDataParallel then broadcasts these weights."""

    def wrap(self, model):
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return super().wrap(model)
