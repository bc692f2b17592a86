"""Wrong averages: ranks exchange their gradients, but combine them wrongly."""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
from base_trainer import ManualAverage
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader, sharded, train

ANYWHERE = [
    "mlp/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64", "linear-exact/ddp/1x4/32", "lm-tokens/ddp/2x2/bf16",
    "mlp/ddp/1x2/bf16-true",
]  # fmt: skip


@known_bad(
    "averaging",
    causes=["summed-over-ranks"],
    on={
        **any_check(*ANYWHERE),
        **failing(
            "gradients",
            "mlp/ddp/1x2",
            "linear-exact/ddp/1x2",
            "cnn-batchnorm/ddp/1x2",
            "contrastive/ddp/1x2",
            "lm-tokens/ddp/1x2",
        ),
        **failing("gradients", "mlp/ddp/1x2", precisions=["16", "bf16"]),
    },
)
def summed_not_averaged(job):
    """Sums gradients over the ranks without dividing by the world size."""
    model = alone(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad(
    "averaging",
    causes=["averaged-twice"],
    on={**any_check(*ANYWHERE), **failing("gradients", "mlp/ddp/1x2", "linear-exact/ddp/1x3")},
)
def divided_although_ddp_averages(job):
    """Divides by the world size, although DDP has averaged already."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "averaging",
    causes=["summed-over-ranks"],
    on={**any_check(*ANYWHERE), **failing("gradients", "mlp/ddp/1x2"), "adam/ddp/1x3/32": "gradients"},
)
def loss_times_world(job):
    """Multiplies the loss by the world size, which cancels DDP's average."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            loss = job.loss(model(batch), batch) * job.world_size
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("averaging", causes=["divided-by-another-count"], on=["mlp/ddp/2x2/32", "mlp/ddp/2x2/64"])
def divided_by_gpus_of_a_node(job):
    """The sum over all ranks is divided by the number of GPUs on one node."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.gpus
            optimizer.step()
            optimizer.zero_grad()


@known_bad("averaging", causes=["divided-by-another-count"], on=["mlp/ddp/1x3/32", "cnn-batchnorm/ddp/1x2/32"])
def averaged_by_one_too_many(job):
    """The sum over the ranks is divided by world + 1."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size + 1
            optimizer.step()
            optimizer.zero_grad()


@known_bad("averaging", causes=["some-tensors-summed"], on=["mlp/ddp/1x3/32", "lm-tokens/ddp/1x2/32"])
def weights_divided_biases_summed(job):
    """Divides only matrices by the world size; vectors keep the sum."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                if parameter.dim() > 1:
                    parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "averaging",
    causes=["applied-once-a-rank"],
    on={
        **any_check("mlp/ddp/1x2/32", "mlp/ddp/1x3/64", "cnn-batchnorm/ddp/1x2/32"),
        **failing("update", "mlp/ddp/1x2"),
    },
)
def shared_parameter_memory(job):
    """Ranks share the parameters' memory, so every rank's step changes all ranks' weights."""
    model = alone(job)
    share_memory(job, model)
    optimizer = job.optimizer(model.parameters())
    # Ranks enter step() together, write one after another, and leave together: a race would make this test flaky.
    optimizer.register_step_pre_hook(lambda *_: [dist.barrier() for _ in range(job.rank + 1)] and None)
    optimizer.register_step_post_hook(lambda *_: [dist.barrier() for _ in range(job.world_size - job.rank)] and None)
    train(job, model, optimizer, after_backward=average)


@known_bad("averaging", causes=["applied-once-a-rank"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/32"])
def shared_parameter_memory_in_turns(job):
    """Like ``shared_parameter_memory``, but each rank enters its step after the ranks before it have finished."""
    model = alone(job)
    share_memory(job, model)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            average(job, model)
            for rank in range(job.world_size):
                if rank == job.rank:
                    optimizer.step()
                dist.barrier()
            optimizer.zero_grad()


@known_bad("averaging", causes=["applied-once-a-rank"], on=["mlp/ddp/1x3/32", "cnn-batchnorm/ddp/1x3/32"])
def stepped_once_a_rank(job):
    """Every process repeats the same step ``world_size`` times."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for _ in range(job.world_size):
                optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "averaging", causes=["summed-over-ranks"], on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64", "lm-tokens/fsdp/2x2/32"]
)
def shards_summed_not_averaged(job):
    """Makes fully_shard sum gradients instead of averaging them, and does not divide the loss either."""
    model = sharded(job)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no other way to skip the division
    train(job, model)


@known_bad("averaging", causes=["averaged-twice"], on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64"])
def divided_before_shards_are_averaged(job):
    """Divides the loss by the world size, although fully_shard averages gradients."""
    model = sharded(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            (job.loss(model(batch), batch) / job.world_size).backward()
            optimizer.step()
            optimizer.zero_grad()


def share_memory(job, model):
    """Map each parameter of all ranks to the same file."""
    names = [None]
    if job.rank == 0:
        names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    for number, parameter in enumerate(model.parameters()):
        file = f"{names[0]}/{number}"
        shared = torch.from_file(file, shared=True, size=parameter.numel(), dtype=parameter.dtype)
        if job.rank == 0:
            shared.copy_(parameter.detach().flatten())
        parameter.data = shared.view_as(parameter)
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(names[0])


@known_bad("averaging", causes=["some-tensors-averaged-twice"], on={"transformer/ddp/1x3/32": "gradients"})
class TiedWeightAveragedTwice(ManualAverage):
    """Divides the tied weight's gradient by the world size twice, once for each layer that uses it."""

    def synchronize(self):
        super().synchronize()
        self.model.tokens.weight.grad /= self.job.world_size


@known_bad("averaging", causes=["some-tensors-summed"], on={"embedding-sparse/ddp/1x3/32": "gradients"})
class SparseGradientsSummed(ManualAverage):
    """Sums sparse gradients over the ranks without dividing by the world size."""

    def synchronize(self):
        super().synchronize()
        for parameter in self.model.parameters():
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad * self.job.world_size
